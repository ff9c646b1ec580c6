"""Checkpoints without frozen weights: what they hold, what they load, and what they say about changed files."""

import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from transformers import AutoModelForCausalLM

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from recipes.language import export as export_checkpoint
from rl_modules.common.errors import UsageError
from rl_modules.language.frozen_weights import digest
from rl_modules.language.grpo import GRPO
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.sft import SFT
from tests.marks import quick
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def write_model(folder, kind=SFT, seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = kind(model_config=TINY)
        module.configure_model()
        for parameter in module.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        shutil.rmtree(folder, ignore_errors=True)
        return str(module.export(folder))


@pytest.fixture
def paths(tmp_path):
    return {"policy": write_model(tmp_path / "policy"), "judge": write_model(tmp_path / "judge", RewardModel, 2),
            "other": write_model(tmp_path / "other", seed=3)}  # fmt: skip


COMMON = {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
SAMPLING = {**COMMON, "max_completion_length": 3}


def prompts():
    return PromptDataModule("addition", batch_size=8, num_generations=4, n_train=8, eval_steps=0)


def ppo_prompts():
    return PromptDataModule("addition", batch_size=8, num_generations=1, n_train=8, eval_steps=0)


def examples():
    return InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)


def pairs():
    return PreferenceDataModule("paths", batch_size=8, n_train=16, eval_steps=0, n_demonstrations=4)


#: Module, datamodule, and the first words of what its checkpoint's weights are called.
CASES = {
    "sft lora": (lambda p: SFT(model_name_or_path=p["policy"], lora=LORA, **COMMON), examples, {"model"}),
    "reward model lora": (lambda p: RewardModel(p["policy"], lora=LORA, **COMMON), pairs, {"model"}),
    "grpo": (lambda p: GRPO(p["policy"], beta=0.1, reward_model_name_or_path=p["judge"], **SAMPLING), prompts,
             {"model", "reward_offset"}),
    "grpo other reference": (
        lambda p: GRPO(p["policy"], beta=0.1, ref_model_name_or_path=p["other"], **SAMPLING), prompts,
        {"model", "reward_offset"}),
    "grpo moving reference": (
        lambda p: GRPO(p["policy"], beta=0.1, ref_model_name_or_path=p["other"], sync_ref_model=True,
                       ref_model_sync_steps=1, **SAMPLING), prompts, {"model", "reference", "reward_offset"}),
    "grpo lora": (lambda p: GRPO(p["policy"], beta=0.1, lora=LORA, **SAMPLING), prompts, {"model", "reward_offset"}),
    "ppo": (lambda p: RLHFPPO(p["policy"], reward_model_name_or_path=p["judge"], **SAMPLING), ppo_prompts,
            {"model", "value_model", "reward_offset"}),
    "ppo lora": (lambda p: RLHFPPO(p["policy"], reward_model_name_or_path=p["judge"], lora=LORA, **SAMPLING),
                 ppo_prompts, {"model", "value_model", "reward_offset"}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", quick(CASES, "sft lora"))
def test_ranks_return_what_they_trained_and_the_frozen_weights_come_from_their_path(case, paths, tmp_path):
    make, data, _ = CASES[case]
    model = make(paths)
    fit(model, data(), max_epochs=1, devices=2, strategy="ddp_fork", callbacks=[SaveAtEnd(tmp_path / "rank.ckpt")])
    saved = type(model).load_from_checkpoint(tmp_path / "rank.ckpt").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[name]), name


class SaveAtEnd(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


@pytest.mark.long
@pytest.mark.parametrize("case", quick(CASES, "sft lora", "grpo moving reference", "ppo lora"))
def test_frozen_weights_are_left_out_and_runs_resume_exactly(case, paths, tmp_path):
    make, data, parts = CASES[case]
    epochs = 3 if "moving" in case else 2  # the reference moves before a step, from the second on
    assert_resumes_exactly(lambda: make(paths), data, tmp_path, epochs=epochs)
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert {name.partition(".")[0] for name in checkpoint["state_dict"]} == parts
    if "lora" in case:
        kept = [name for name in checkpoint["state_dict"] if not name.startswith("reward_offset")]
        assert all("lora_" in name or "score" in name for name in kept)
        assert len(checkpoint["optimizer_states"][0]["state"]) < len(kept) + 1
    loaded = type(make(paths)).load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    again = make(paths)
    fit(again, data(), max_epochs=epochs)
    state = again.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


class SaveEveryStep(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("case", quick(CASES, "sft lora", "grpo"))
def test_averages_beside_frozen_weights_resume_exactly(case, paths, tmp_path):
    make, data, parts = CASES[case]

    def run(ckpt_path=None):
        module, average = make(paths), EMAWeightAveraging(decay=0.5)
        fit(module, data(), max_steps=3, callbacks=[average, SaveEveryStep(tmp_path)], ckpt_path=ckpt_path)
        return module.state_dict()

    whole = run()
    (tmp_path / "3.ckpt").rename(tmp_path / "whole.ckpt")
    resumed = run(tmp_path / "1.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "3.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    for key in ("state_dict", "current_model_state"):
        assert {name.partition(".")[0] for name in checkpoint[key]} == parts
    assert all(torch.equal(value, whole[name]) for name, value in checkpoint["state_dict"].items())
    # A run that averages nothing begins with the averages.
    plain = make(paths)
    fit(plain, data(), max_steps=3, ckpt_path=tmp_path / "3.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in plain.state_dict().items())


def test_a_base_from_scratch_has_no_source_and_is_kept(tmp_path):
    module = SFT(model_config=TINY, lora=LORA, **COMMON)
    fit(module, examples(), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    loaded = SFT.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    state = module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].keys() == state.keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "changed", "argument"),
    [
        ("sft lora", "policy", "model_name_or_path"),
        ("grpo", "judge", "reward_model_name_or_path"),
        ("grpo", "policy", "model_name_or_path"),
        ("grpo other reference", "other", "ref_model_name_or_path"),
        ("ppo lora", "judge", "reward_model_name_or_path"),
    ],
)
def test_a_changed_directory_is_an_error_that_names_it(case, changed, argument, paths, tmp_path):
    make, data, _ = CASES[case]
    fit(make(paths), data(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    write_model(paths[changed], RewardModel if changed == "judge" else SFT, seed=9)
    message = rf"^{argument}='?{paths[changed]}'? holds other weights than the run began with"
    with pytest.raises(UsageError, match=message):
        type(make(paths)).load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    with pytest.raises(UsageError, match=message):
        fit(make(paths), data(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)


@pytest.mark.long
def test_a_directory_that_is_gone_is_named_and_may_have_moved(paths, tmp_path):
    make, data, _ = CASES["grpo other reference"]
    fit(make(paths), data(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    shutil.move(paths["other"], tmp_path / "moved")
    with pytest.raises(UsageError, match=rf"^ref_model_name_or_path='{paths['other']}' is not there.*digest"):
        GRPO.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    moved = str(tmp_path / "moved")
    loaded = GRPO.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True, ref_model_name_or_path=moved)
    theirs = AutoModelForCausalLM.from_pretrained(moved).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.reference.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("case", ["sft lora", "ppo lora"])
def test_asked_for_they_are_kept_and_the_directories_may_go(case, paths, tmp_path):
    make, data, _ = CASES[case]
    module = make(paths)
    module.hparams["save_frozen_weights"] = True
    fit(module, data(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    for path in paths.values():
        shutil.rmtree(path)
    loaded = type(module).load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    state = module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("at_first", [True, False])
def test_a_resumed_run_may_choose_anew_and_stays_exact(at_first, paths, tmp_path):
    def module(keep):
        return GRPO(paths["policy"], beta=0.1, lora=LORA, reward_model_name_or_path=paths["judge"],
                    save_frozen_weights=keep, **SAMPLING)  # fmt: skip

    def state(keep, epochs, **more):
        fit(made := module(keep), prompts(), max_epochs=epochs, precision="bf16-true", **more).save_checkpoint(
            tmp_path / "last.ckpt"
        )
        return made.state_dict()

    whole = state(True, 2)
    state(at_first, 1)
    shutil.move(tmp_path / "last.ckpt", tmp_path / "part.ckpt")
    resumed = state(not at_first, 2, ckpt_path=tmp_path / "part.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    # Once they were written they are written on: the directory may have changed.
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].keys()
    assert kept == whole.keys()


@pytest.mark.long
def test_a_policy_is_exported_without_its_judges(paths, tmp_path):
    module = CASES["ppo"][0](paths)
    fit(module, ppo_prompts(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    for path in paths.values():
        shutil.rmtree(path)
    folder = export_checkpoint(str(tmp_path / "last.ckpt"), str(tmp_path / "exported"))
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).state_dict(), module.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


@pytest.mark.long
def test_adapters_alone_export_as_a_whole_model(paths, tmp_path):
    module = CASES["sft lora"][0](paths)
    fit(module, examples(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    folder = export_checkpoint(str(tmp_path / "last.ckpt"), str(tmp_path / "exported"))
    theirs, tokens = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = module.model.eval()(input_ids=tokens).logits
        torch.testing.assert_close(theirs(input_ids=tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_digest_changes_with_any_byte_name_and_type():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    same = {"b": weights["b"].clone(), "a": weights["a"].clone()}
    changed = [
        {"a": weights["a"], "b": torch.tensor(1.0000001)},
        {"a": weights["a"].view(3, 2), "b": weights["b"]},
        {"a": weights["a"].bfloat16(), "b": weights["b"]},
        {"c": weights["a"], "b": weights["b"]},
    ]
    assert digest(same) == digest(weights)
    assert digest(weights) not in [digest(other) for other in changed]


@pytest.mark.long
def test_a_checkpoint_without_a_reference_gives_none(tmp_path):
    checkpoints = {}
    for beta in (0.0, 0.1):
        run = fit(GRPO(model_config=TINY, beta=beta, **SAMPLING), prompts(), max_steps=1)
        run.save_checkpoint(checkpoints.setdefault(beta, tmp_path / f"{beta}.ckpt"))
    with pytest.raises(UsageError, match="beta=0.1 needs a reference, which the checkpoint's run did not have"):
        GRPO.load_from_checkpoint(checkpoints[0.0], beta=0.1)
    for beta, message in ((0.1, "give the run a reference of its own, and the checkpoint's had none"),
                          (0.0, "give the run no reference of its own, and the checkpoint's had one")):  # fmt: skip
        with pytest.raises(UsageError, match=f"beta={beta}, .* {message}"):
            fit(GRPO(model_config=TINY, beta=beta, **SAMPLING), prompts(), checkpoints[0.1 - beta], max_steps=2)
    with_adapters = tmp_path / "adapters.ckpt"
    fit(GRPO(model_config=TINY, lora=LORA, **SAMPLING), prompts(), max_steps=1).save_checkpoint(with_adapters)
    warm = GRPO.load_from_checkpoint(with_adapters, beta=0.1)
    assert fit(warm, prompts(), max_steps=1).global_step == 1 and warm.reference is None
