"""A GGUF file in place of a model's directory: its weights and tokens are those that transformers reads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_modules import SFT
from rl_modules.common.errors import UsageError
from rl_modules.language.pretrained import directory_of

gguf = pytest.importorskip("gguf")
WIDTH, LAYERS, HEADS = 32, 2, 4
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+=", "Ġ", "a", "b", "ab"]


def write(path):
    """A Llama of random weights in single precision, with a tokenizer of a few characters."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).numpy() * 0.1

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_tensor("token_embd.weight", drawn(len(TOKENS), WIDTH))
    writer.add_tensor("output_norm.weight", drawn(WIDTH))
    for i in range(LAYERS):
        for name, shape in (("attn_q", (WIDTH, WIDTH)), ("attn_k", (WIDTH, WIDTH)), ("attn_v", (WIDTH, WIDTH)),
                            ("attn_output", (WIDTH, WIDTH)), ("ffn_gate", (48, WIDTH)), ("ffn_up", (48, WIDTH)),
                            ("ffn_down", (WIDTH, 48)), ("attn_norm", (WIDTH,)), ("ffn_norm", (WIDTH,))):  # fmt: skip
            writer.add_tensor(f"blk.{i}.{name}.weight", drawn(*shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_a_module_has_the_files_weights(tmp_path, cache, monkeypatch):
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    module = SFT(model_name_or_path="some_weights/tiny.gguf")
    module.configure_model()
    theirs = AutoModelForCausalLM.from_pretrained(package, gguf_file="tiny.gguf").state_dict()
    ours = module.model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert module.tokenizer.convert_ids_to_tokens(module.tokenizer("1+1=ab").input_ids)[-5:] == [
        "1",
        "+",
        "1",
        "=",
        "ab",
    ]
    [made] = cache.iterdir()
    assert module.hparams["model_name_or_path"] == str(made)
    assert directory_of(str(package / "tiny.gguf")) == str(made), "read once"


@pytest.mark.parametrize("name", ["none/of.gguf", "json/of.gguf", "none.gguf"])
def test_a_file_that_is_not_there(name, cache):
    with pytest.raises(UsageError, match=r"is no file.*install the package"):
        SFT(model_name_or_path=name)


def test_a_file_of_something_else(tmp_path, cache):
    (tmp_path / "text.gguf").write_text("no weights")
    with pytest.raises(UsageError, match="can't be read"):
        SFT(model_name_or_path=str(tmp_path / "text.gguf"))
    assert not list(cache.iterdir())
