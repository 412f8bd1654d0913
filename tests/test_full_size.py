"""An archive of full size: Qwen3-1.7B's shape with random weights, which compress worse than trained ones.

The limits are those that the project promises; times are measured by `python -m scripts.benchmark load`.
"""

import pytest
import torch

from model_io import inventory, verify
from scripts._load_benchmark import memory_of_load
from scripts.random_model import QWEN3_1_7B, pack_random_model


@pytest.mark.slow
def test_a_student_of_1_7_billion_weights(qwen3_tokenizer, tmp_path):
    torch.set_num_threads(2)  # the search of 1.4e9 weights' scales takes a minute on one core
    report = pack_random_model(QWEN3_1_7B, tmp_path / "model", tokenizer_dir=qwen3_tokenizer)
    assert report["files"]["weights.safetensors.zst"] <= 1.0e9
    assert report["size_bytes"] <= 1.08e9
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) <= 1.08e9

    archive = verify(tmp_path / "model")
    codecs = [row["codec"] for row in inventory(archive)]
    assert (codecs.count("nf4"), codecs.count("int8"), codecs.count("none")) == (28 * 7, 1, 28 * 4 + 1)
    assert archive.adapter_document["rank"] == 32 and len(archive.adapter_document["targets"]) == 28 * 7
    # fewer bits a linear weight than llama.cpp's Q4_K_M has (4.89), adapter included
    assert report["bits_per_weight_linear_with_adapter"] < 4.89

    memory = memory_of_load(tmp_path / "model", "packed")
    assert memory["peak_bytes"] <= 1.5e9
    # 10 % above what is kept (weights and tokenizer), and 32 MiB of buffers whose size is fixed
    assert memory["peak_bytes"] <= 1.10 * memory["kept_bytes"] + (32 << 20)
    # the decoded stream once, the adapter once, and the bf16 scales that the stream's double-quantized ones decode to
    scales = sum(2 * row["elements"] // 64 for row in inventory(archive) if row["codec"] == "nf4")
    stored = archive.quantization["weights"]["size_bytes"] + archive.adapter_document["size_bytes"]
    assert memory["model_bytes"] <= stored + scales + (1 << 20)
