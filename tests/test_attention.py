"""Grouped attention against transformers' own SDPA: forward, gradients, and what it leaves to SDPA."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.attention import use_grouped_attention


def models(groups):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2 * groups,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    plain = Qwen3ForCausalLM(config).eval()
    ours = Qwen3ForCausalLM(config).eval()
    ours.load_state_dict(plain.state_dict())
    return plain, use_grouped_attention(ours)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 37, 600])
def test_equals_sdpa_forward_and_backward(groups, tokens):
    plain, ours = models(groups)
    ids = torch.randint(0, 99, (3, tokens), generator=torch.Generator().manual_seed(tokens))
    outputs = [model(input_ids=ids, use_cache=False).logits for model in (plain, ours)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_what_stands_right_of_a_position_is_never_seen():
    _, ours = models(3)
    ids = torch.arange(20)[None] % 99
    other = ids.clone()
    other[0, 12:] = 7
    with torch.inference_mode():
        a, b = (ours(input_ids=x, use_cache=False).logits for x in (ids, other))
    assert torch.equal(a[:, :12], b[:, :12]) and not torch.equal(a[:, 12:], b[:, 12:])


def test_a_given_mask_is_obeyed():
    """The decode step passes one: keys beyond a slot's own length must not count."""
    plain, ours = models(3)
    ids, mask = torch.arange(9)[None], torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., 0] = False
    mask[..., 0, 0] = True
    with torch.inference_mode():
        a, b = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (plain, ours))
    torch.testing.assert_close(a, b)
