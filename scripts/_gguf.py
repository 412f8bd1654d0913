"""A student as a GGUF file, quantized by llama.cpp itself and read back: how its 4-bit types do on our weights.

    write_gguf(path, Checkpoint(folder), config)                    # bf16 or fp32, tensor by tensor
    quantize_gguf(path, "Q4_0", quantized, llama_python)            # llama.cpp's quantizer, in a process of its own
    read_sizes(quantized, config), read_weights(quantized, config)  # real bits; fp32 weights by our names

llama.cpp comes with llama-cpp-python, which is built from source and pulls in its own numpy: it lives in a throw-away
environment, whose python is named, and none of it is imported here. The file has no vocabulary: the quantizer asks for
none, and an archive's tokenizer is no matter of codecs.
"""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from drafter.checkpoint import codecs_of, meta_model, ties_of

INSTALL = "python -m venv DIR && DIR/bin/pip install llama-cpp-python==0.3.36"
# The whole program of the other process. Anything but 0 is an error; llama.cpp says why on stderr.
QUANTIZE = """
import ctypes, sys
import llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.nthread = int(sys.argv[3]), int(sys.argv[4])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)))
"""

# ---------------------------------------------------------------------------- names and shapes


def gguf_names(config: Mapping[str, Any]) -> dict[str, str]:
    """{our tensor name: llama.cpp's} of every stored tensor; a tied head is not stored."""
    model = meta_model(config)
    table = gguf.get_tensor_name_map(_architecture(config), config["num_hidden_layers"])
    names = [name for name in model.state_dict() if name not in ties_of(model)]
    return {name: table.get_name(name, try_suffixes=(".weight",)) for name in names}


def _architecture(config: Mapping[str, Any]) -> gguf.MODEL_ARCH:
    return {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config["model_type"]]


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Number of heads of a matrix whose rows llama.cpp stores in another order, else None."""
    # arch llama rotates neighbouring rows (0, 1), (2, 3), ... of a head where transformers rotates row i with row
    # i + E/2; arch qwen3 rotates as transformers does.
    if config["model_type"] != "llama":
        return None
    by_name = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return next((config[key] for part, key in by_name.items() if name.endswith(f"{part}.weight")), None)


def _reordered(weight: Tensor, heads: int | None, back: bool = False) -> Tensor:
    """[H * E, D], rows of a head [2, E/2] -> [E/2, 2]; `back` undoes it."""
    if heads is None:
        return weight
    half = weight.shape[0] // heads // 2
    split = (heads, half, 2) if back else (heads, 2, half)
    return weight.reshape(*split, -1).transpose(1, 2).reshape(weight.shape)


# ---------------------------------------------------------------------------- write


def write_gguf(path: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Weights of a llama or qwen3 model -> GGUF without vocabulary; matrices in bf16 where they are, else in fp32.

    One tensor is in memory at a time.
    """
    names = gguf_names(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_architecture(config)])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for ours, theirs in names.items():
        array, kind = _array(weights[ours])
        # a shape in elements: bf16 has no numpy dtype, and a raw array's own shape would be read as bytes
        writer.add_tensor_info(theirs, list(weights[ours].shape), array.dtype, array.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for ours in names:
        writer.write_tensor_data(_array(_reordered(weights[ours], _heads(ours, config)))[0])
    writer.close()


def _array(weight: Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    weight = weight.detach().contiguous()
    if weight.dim() > 1 and weight.dtype == torch.bfloat16:
        return weight.view(torch.int16).numpy(), gguf.GGMLQuantizationType.BF16
    return weight.float().numpy(), None  # norms are fp32 in every GGUF file


# ---------------------------------------------------------------------------- quantize


def quantize_gguf(source: Path, file_type: str, target: Path, llama_python: str, threads: int = 2) -> None:
    """One file type of llama.cpp ("Q4_0", "IQ4_NL", "Q4_K_M", ...), no importance matrix. ValueError says why not."""
    number = getattr(gguf.LlamaFileType, f"MOSTLY_{file_type}").value
    command = [llama_python, "-c", QUANTIZE, str(source), str(target), str(number), str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{llama_python} cannot be run ({error}); {INSTALL}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise ValueError(f"llama.cpp did not make {file_type} ({' / '.join(said)}); the environment: {INSTALL}")


# ---------------------------------------------------------------------------- read


def _stored(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(our name, tensor of gguf's reader); ValueError unless the file holds exactly the tensors of the model."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf_names(config)
    if set(found) != set(names.values()):
        raise ValueError(f"{path.name} holds other tensors: {sorted(set(found) ^ set(names.values()))[:3]}")
    for ours, theirs in names.items():
        yield ours, found[theirs]


def read_sizes(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Bits a weight as stored (linear layers, all tensors), bytes of the file, and {type: tensors} of both kinds."""
    linear = {name for name, codec in codecs_of(meta_model(config)).items() if codec == "nf4"}
    stored = {
        name: (int(one.n_bytes), int(one.n_elements), one.tensor_type.name) for name, one in _stored(path, config)
    }

    def bits(names) -> float:
        return 8 * sum(stored[name][0] for name in names) / sum(stored[name][1] for name in names)

    types: dict[str, dict[str, int]] = {"linear": {}, "tables": {}}
    for name, (_, _, kind) in stored.items():
        group = "linear" if name in linear else "tables" if "norm" not in name else None
        if group:
            types[group][kind] = types[group].get(kind, 0) + 1
    sizes = {"bits_per_weight_linear": bits(linear), "bits_per_weight_all": bits(stored)}
    return {**sizes, "size_bytes": path.stat().st_size, "types": types}


def said_types(types: Mapping[str, Mapping[str, int]]) -> str:
    """For people: "linear 110 IQ4_NL + 2 Q5_K, tables 1 Q8_0"."""
    return ", ".join(
        f"{group} {' + '.join(f'{count} {kind}' for kind, count in found.items())}" for group, found in types.items()
    )


def read_weights(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(our name, fp32 weight) of every stored tensor, dequantized by the gguf package, rows in our order."""
    for name, stored in _stored(path, config):
        array = gguf.quants.dequantize(stored.data, stored.tensor_type)
        yield name, _reordered(torch.from_numpy(np.array(array, dtype=np.float32)), _heads(name, config), back=True)
