"""Models: what the backward pass keeps, and what is read of a directory."""

import builtins
import json
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from datamodules import PromptDataModule
from rl_modules import GRPO, RLHFPPO, SFT, RewardModel
from rl_modules.common.errors import UsageError
from rl_modules.language.export import export_model
from rl_modules.language.fast.kernels import checkpoint_activations
from rl_modules.language.pretrained import tokenizer_from_dict
from rl_modules.language.tokenizer import ALPHABET, character_tokenizer, tokenizer_to_dict
from tests.training import fit

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}  # fmt: skip
TOKENS = torch.arange(3, 51).view(4, 12)


def logits_and_gradients(how, model_type="qwen2"):
    fields = GPT2 if model_type == "gpt2" else TINY
    module = SFT(model_config={"model_type": model_type, **fields}, gradient_checkpointing=how)
    module.configure_model()
    model = module.model.train()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return logits, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", [True, "selective"])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_gradients_do_not_depend_on_what_is_kept(how, model_type):
    logits, gradients = logits_and_gradients(False, model_type)
    other_logits, other = logits_and_gradients(how, model_type)
    assert torch.equal(logits, other_logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_selective_checkpointing_repeats_no_matrix_product():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
            return func(*args, **(kwargs or {}))

    counts = {}
    for how in (False, "selective", True):
        with Products() as products:
            logits_and_gradients(how)
        counts[how] = products.count
    assert counts["selective"] == counts[False] < counts[True]


@pytest.mark.parametrize(("fields", "heads"), [
    ({}, (4, 4)), ({"num_attention_heads": 2}, (2, 2)), ({"num_attention_heads": 4, "num_key_value_heads": 1}, (4, 1)),
])  # fmt: skip
def test_a_small_model_has_as_many_key_as_query_heads_unless_told(fields, heads):
    model = SFT(model_config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, **fields})
    model.configure_model()
    config = model.model.config
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    tokens = torch.tensor([[5, 6, 7]])
    assert model.model(input_ids=tokens).logits.shape[:2] == tokens.shape


def test_another_way_of_checkpointing_is_a_usage_error():
    with pytest.raises(UsageError, match="gradient_checkpointing='most' must be true, false or selective"):
        checkpoint_activations(torch.nn.Linear(1, 1), "most")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["directory", "checkpoint"])
def test_judges_and_values_compute_as_the_policy_is_told_to(kind, tmp_path, make_trainer):
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    path = tmp_path / "judge"
    if kind == "directory":
        judge.export(path)
    else:
        path = path.with_suffix(".ckpt")
        trainer = make_trainer(max_steps=0)
        trainer.strategy.connect(judge)
        trainer.save_checkpoint(path)
    for attention, dtype in (("eager", "float32"), ("sdpa", "bfloat16")):
        options = {"model_config": TINY, "reward_model_name_or_path": str(path), "attn_implementation": attention,
                   "torch_dtype": dtype}  # fmt: skip
        policy, grpo = RLHFPPO(**options), GRPO(beta=0.1, **options)
        policy.configure_model()
        grpo.configure_model()
        for model in (policy.model, policy.reference, policy.reward_model, policy.value_model, grpo.reward_model):
            assert model.config._attn_implementation == attention
            assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
            assert {p.device for p in model.parameters()} == {torch.device("cpu")}


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta-v2"])
@pytest.mark.parametrize("algorithm", [GRPO, RLHFPPO])
def test_a_judge_without_a_score_head_is_refused_where_it_is_loaded(algorithm, kind, tmp_path):
    tokenizer = character_tokenizer()
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                                  num_hidden_layers=1, num_attention_heads=2, num_labels=1, pad_token_id=0)  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = algorithm(model_config=TINY, reward_model_name_or_path=str(tmp_path))
    with pytest.raises(UsageError, match=f"^reward_model_name_or_path=.*can't judge: a {kind} model has no linear"):
        policy.configure_model()


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_later_stage_reads_texts_in_the_tokens_of_the_first(model_type, tmp_path):
    """Spaces and line feeds too, which transformers' class for Qwen2 reads otherwise."""
    tiny = {"model_type": model_type, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2}  # fmt: skip
    ids = character_tokenizer()(ALPHABET).input_ids
    assert len(ids) == len(ALPHABET)
    first = SFT(model_config=tiny)
    for name in ("first", "second"):
        first.configure_model()
        first.export(tmp_path / name)
        first = SFT(model_name_or_path=str(tmp_path / name))
        assert first.tokenizer(ALPHABET).input_ids == ids and first.tokenizer.decode(ids) == ALPHABET
    theirs = AutoTokenizer.from_pretrained(tmp_path / "second")
    assert theirs(ALPHABET).input_ids == ids and theirs.decode(ids) == ALPHABET
    again = tokenizer_from_dict(tokenizer_to_dict(first.tokenizer))  # as a checkpoint brings it
    assert again(ALPHABET).input_ids == ids


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Python code that a model directory may bring, with a user who would let it run; returns how to find out."""
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    ran = tmp_path / "ran"
    return f"open({str(ran)!r}, 'w')\nraise ImportError", ran


def with_fields(text, **fields):
    return json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize("argument", ["model_name_or_path", "reward_model_name_or_path", "tokenizer_name_or_path"])
def test_code_of_a_model_directory_is_never_run(argument, code, tmp_path):
    module = SFT(model_config=TINY)
    module.configure_model()
    folder = module.export(tmp_path / "model")
    (folder / "own.py").write_text(code[0])
    is_tokenizer = argument.startswith("tokenizer")
    if is_tokenizer:
        (folder / "config.json").unlink()  # it would say which class of transformers reads the tokenizer
    name = "tokenizer_config.json" if is_tokenizer else "config.json"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
    own = {"tokenizer_class": "Own"} if is_tokenizer else {"model_type": "own"}
    (folder / name).write_text(with_fields((folder / name).read_text(), auto_map=auto_map, **own))
    begin = "tokenizer '.*tokenizer_name_or_path" if is_tokenizer else f"{argument}='.*"
    with pytest.raises(UsageError, match=r"needs code of its own, and code of a model directory is never run") as error:
        GRPO(**{"model_config": None if argument == "model_name_or_path" else TINY, argument: str(folder)}
             ).configure_model()  # fmt: skip
    assert re.match(begin, str(error.value)) and "\n" not in str(error.value)
    assert not code[1].exists()


def test_code_beside_the_tokenizer_in_a_checkpoint_is_never_run(code):
    files = tokenizer_to_dict(character_tokenizer())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", None]}}
    files["tokenizer_config.json"] = with_fields(files["tokenizer_config.json"], **own)
    with pytest.raises(UsageError, match="^the checkpoint's tokenizer can.t be read, or needs code of its own"):
        tokenizer_from_dict({**files, "own.py": code[0]})
    assert not code[1].exists()


def test_transformers_own_class_is_read_where_a_directory_brings_another(code, tmp_path):
    module = SFT(model_config=TINY)
    module.configure_model()
    folder = module.export(tmp_path / "model")
    (folder / "own.py").write_text(code[0])
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(with_fields((folder / "config.json").read_text(), auto_map=auto_map))
    read = SFT(model_name_or_path=str(folder))
    read.configure_model()
    torch.testing.assert_close(read.model.state_dict(), module.model.state_dict(), rtol=0, atol=0)
    assert not code[1].exists()


def numbers_tokenizer():
    """Byte-level BPE whose tokens hold several digits, which transformers' class for Qwen2 splits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(["12 + 345 = 357"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_an_export_is_read_in_the_tokens_of_training(model_type, tmp_path):
    tokenizer, text = numbers_tokenizer(), "12 + 345 = 357\n\n It's 1.50, déjà"
    ids = tokenizer(text).input_ids
    model = SFT(model_config={"model_type": model_type, **TINY}, tokenizer_name_or_path=tokenizer)
    model.configure_model()
    model.export(tmp_path / "first")
    again = SFT(model_name_or_path=str(tmp_path / "first"))
    again.configure_model()
    again.export(tmp_path / "second")
    for folder in ("first", "second"):
        for trust in (None, False, True):
            theirs = AutoTokenizer.from_pretrained(tmp_path / folder, trust_remote_code=trust)
            assert theirs(text).input_ids == ids and theirs.decode(ids) == text
            assert theirs.eos_token == "<eos>" and len(theirs) == len(tokenizer)
        assert (tmp_path / folder / "plain_tokenizer.py").exists() == (model_type == "qwen2")
    files = tokenizer_to_dict(again.tokenizer)
    assert "auto_map" not in files["tokenizer_config.json"] and tokenizer_from_dict(files)(text).input_ids == ids


def test_an_export_that_is_read_in_other_tokens_says_so(tmp_path, monkeypatch):
    model = SFT(model_config={"model_type": "qwen2", **TINY}, tokenizer_name_or_path=numbers_tokenizer())
    model.configure_model()
    theirs = character_tokenizer()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: theirs)
    with pytest.warns(match=r"splits texts into other tokens than .*PreTrainedTokenizerFast\.from_pretrained\("):
        export_model(model.model, model.tokenizer, tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_model(model.model, theirs, tmp_path / "model")


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["c_attn"]}])
def test_an_export_has_the_dropout_rates_of_the_model(lora, tmp_path):
    rates = {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    start = SFT(model_config={"model_type": "gpt2", **sizes, **rates})
    start.configure_model()
    start.export(tmp_path / "start")
    module = GRPO(str(tmp_path / "start"), lora=lora)
    module.configure_model()
    assert module.model.config.resid_pdrop == 0.0 and dropped(module.model) == {0.0}
    trainer = fit(module, PromptDataModule("addition", batch_size=4, num_generations=4, n_train=4), max_steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "a.ckpt")
    loaded.configure_model()
    for name, exported in (("own", module), ("loaded", loaded)):
        exported.export(tmp_path / name)
        fields = json.loads((tmp_path / name / "config.json").read_text())
        assert {rate: fields[rate] for rate in rates} == rates and "removed_dropout" not in fields
        assert dropped(exported.model) == {0.0} and exported.model.config.resid_pdrop == 0.0, "it may train further"
    again = SFT(model_name_or_path=str(tmp_path / "own"))
    again.configure_model()
    assert dropped(again.model) == {0.0, 0.1, 0.2}


def dropped(model):
    return {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


# -------------------------------------------------------------------- weights that a directory lacks


def rewrite(folder, target, rename):
    """A copy of a model's directory with its weights under other names; None: left out."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    weights = {rename(name): weight for name, weight in load_file(file).items()}
    save_file({name: weight for name, weight in weights.items() if name is not None}, file, {"format": "pt"})
    return str(target)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directories")
    for name, algorithm in (("causal", SFT), ("score", RewardModel)):
        module = algorithm(model_config=TINY)
        module.configure_model()
        module.export(folder / name)
    return folder


def test_a_directory_that_lacks_weights_is_refused(directories, tmp_path):
    compiled = rewrite(directories / "causal", tmp_path / "compiled", lambda name: f"_orig_mod.{name}")
    half = rewrite(directories / "causal", tmp_path / "half", lambda name: None if "layers.1" in name else name)
    with pytest.raises(UsageError, match=r"compiled' lacks 27 .* such as lm_head.weight and has _orig_mod.model.embed"):
        SFT(model_name_or_path=compiled).configure_model()
    for algorithm in (SFT, RewardModel):
        with pytest.raises(UsageError, match=r"half' lacks 12 of the model's weights, such as model.layers.1.input"):
            algorithm(model_name_or_path=half).configure_model()


def test_only_a_causal_model_may_lack_the_reward_head(directories, tmp_path):
    RewardModel(model_name_or_path=str(directories / "causal")).configure_model()
    headless = rewrite(directories / "score", tmp_path / "headless", lambda name: None if "score" in name else name)
    with pytest.raises(UsageError, match=r"headless' lacks 1 of the model's weights, such as score.weight"):
        RewardModel(model_name_or_path=headless).configure_model()
    judged = RLHFPPO(model_name_or_path=str(directories / "causal"), reward_model_name_or_path=headless)
    with pytest.raises(UsageError, match=r"can't judge: .* such as score.weight"):
        judged.configure_model()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_size": 64}, r"has model.embed_tokens.weight of shape \(99, 32\), its config of \(99, 64\)"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3 is more than the 2 layers"),
    ],
)
def test_sizes_that_the_weights_have_not_are_refused(fields, reason, directories):
    with pytest.raises(UsageError, match=reason):
        SFT(model_name_or_path=str(directories / "causal"), model_config=fields).configure_model()
