"""PPO with verifiers: reward functions alone or beside a reward model, against GRPO's rewards and hand-made tables."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import PromptDataModule
from rl_modules import GRPO
from rl_modules.common.errors import UsageError
from rl_modules.language.rlhf_ppo import RLHFPPO
from tests.rl_modules.language.test_rlhf_ppo import (
    TINY,
    Curves,
    distribution,
    every_completion,
    folders,  # noqa: F401
    letters,
    make,  # noqa: F401
    weights,
)
from tests.training import assert_equal_checkpoints, fit

LORA = {"r": 2, "target_modules": "all-linear"}
#: Two reward functions; the second applies to every other completion only.
FUNCTIONS = ["exact_answer", "tests.rl_modules.language.test_verifiers:length_of_even"]


def length_of_even(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) if i % 2 == 0 else None for i, ids in enumerate(completion_ids)]


def nobody_knows(prompts, completions, **columns):
    return [None if i % 2 == 0 else 1.0 for i in range(len(completions))]


def kept(cls):
    """The class, with each rollout and what it prepared of it kept in ``seen``."""

    class Kept(cls):
        seen = None

        def prepare(self, rollout):
            fields = super().prepare(rollout)
            self.seen = (self.seen or []) + [(rollout, fields)]
            return fields

    return Kept


def verified(make, cls=RLHFPPO, data=None, **model):  # noqa: F811
    return make(cls, {"reward_funcs": FUNCTIONS, "num_generations": 4, **(data or {})},
                **{"reward_model_name_or_path": None, **model})  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("judged", [False, True])
def test_rewards_are_those_of_grpo(make, folders, judged):  # noqa: F811
    judge = str(folders / "reward") if judged else None
    given = {"reward_weights": [2.0, -0.5, 3.0][: 2 + judged], "reward_model_name_or_path": judge}
    rollouts = []
    for cls in (GRPO, RLHFPPO):
        module, data = verified(make, kept(cls), **given)
        fit(module, data, max_steps=1)
        rollouts.append(module.seen[0][0])
    ours, theirs = rollouts[1], rollouts[0]
    assert ours["texts"] == theirs["texts"] and ours["reward_names"] == theirs["reward_names"]
    assert ours["reward"].std() > 0
    torch.testing.assert_close(ours["reward"], theirs["reward"])


def test_beside_a_reward_model_functions_without_weights_are_measured_only(make):  # noqa: F811
    module, data = make(kept(RLHFPPO), {"reward_funcs": FUNCTIONS})
    logger = Curves()
    fit(module, data, max_steps=1, logger=logger)
    rollout, _ = module.seen[0]
    torch.testing.assert_close(rollout["reward"], module.reward_model_scores(rollout))
    named = [point for _, point in logger.points if "train/rewards/length_of_even/mean" in point]
    lengths = rollout["length"][::2].float()
    assert named[0]["train/rewards/length_of_even/mean"] == pytest.approx(lengths.mean().item())


def test_token_advantages_of_a_verifier_against_a_hand_worked_table(make):  # noqa: F811
    """V = 0 at first, no KL, γ = λ = 1: every token's advantage is its completion's reward."""
    module, data = verified(make, kept(RLHFPPO), {"reward_funcs": ["exact_answer"]}, beta=0.0, lam=1.0,
                            whiten_advantages=False)  # fmt: skip
    fit(module, data, max_steps=1)
    rollout, fields = module.seen[0]
    answers = [record["answer"] for record in rollout["records"]]
    expected = torch.tensor([float(t == a) for t, a in zip(rollout["texts"], answers, strict=True)])
    assert torch.equal(fields["advantage"], expected.unsqueeze(1) * fields["mask"])
    assert torch.equal(fields["value"], torch.zeros_like(fields["value"]))


def test_rewards_of_tokens_stay_with_their_tokens():
    module = RLHFPPO(beta=0.5, gamma=1.0, lam=1.0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    rollout = {
        "mask": mask,
        "reward": torch.tensor([[1.0, 0.0, 2.0], [0.25, -1.0, 9.0]]),
        "log_prob": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]]),
        "ref_log_prob": torch.tensor([[-2.0, -2.0, -1.0], [-1.0, -1.0, 0.0]]),
    }
    # r_t - β (log π - log π_ref)_t
    reward = torch.tensor([[0.5, 0.0, 3.0], [0.25, -1.0, 0.0]])
    torch.testing.assert_close(module.token_rewards(rollout), reward)
    # λ = γ = 1 and V = 0: the sum of what is still to come.
    togo = torch.tensor([[3.5, 3.0, 3.0], [-0.75, -1.0, 0.0]])
    torch.testing.assert_close(module.advantages(reward, torch.zeros(2, 3), mask), togo)


def test_a_subclass_may_reward_every_token(make):  # noqa: F811
    class Steps(kept(RLHFPPO)):
        def rewards(self, rollout):
            return torch.arange(1.0, 1 + rollout["log_prob"].shape[1]).expand(rollout["log_prob"].shape).clone()

    module, data = verified(make, Steps, beta=0.0, lam=0.0, whiten_advantages=False)
    logger = Curves()
    fit(module, data, max_steps=1, logger=logger)
    rollout, fields = module.seen[0]
    places = torch.arange(1.0, 1 + fields["mask"].shape[1])
    torch.testing.assert_close(fields["advantage"], places * fields["mask"])  # λ = 0, V = 0: the token's own reward
    score = next(point["train/objective/scores"] for _, point in logger.points if "train/objective/scores" in point)
    n = rollout["length"].float()
    assert score == pytest.approx((n * (n + 1) / 2).mean().item())


def test_completions_that_no_function_scores_count_in_no_loss(make):  # noqa: F811
    module, data = verified(make, kept(RLHFPPO),
                            {"reward_funcs": ["tests.rl_modules.language.test_verifiers:nobody_knows"]})  # fmt: skip
    fit(module, data, max_steps=1)
    mask = module.seen[0][1]["mask"]
    assert not mask[::2].any() and mask[1::2, 0].all()


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_value_model_starts_as_the_policys_body_and_0(make, lora):  # noqa: F811
    module, _ = verified(make, lora=lora)
    module.configure_model()
    text = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([2]), torch.tensor([3])
    _, value, _ = module.policy_and_value(*text)
    assert torch.equal(value, torch.zeros(1, 3))
    bodies = [model.get_base_model() if lora else model for model in (module.model, module.value_model)]
    states = [body.base_model(input_ids=text[0]).last_hidden_state for body in bodies]
    torch.testing.assert_close(states[0], states[1])
    own = {id(p) for p in module.model.parameters()}
    assert not own & {id(p) for p in module.value_model.parameters()}


def test_only_policy_and_value_learn_and_no_reference_is_kept_without_a_price(make):  # noqa: F811
    module, data = verified(make, data={"num_iterations": 2}, beta=0.0)
    module.configure_model()
    assert module.reference is None and module.reward_model is None
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    logger = Curves()
    fit(module, data, max_steps=2, logger=logger)
    moved = {name.split(".")[0] for name, x in module.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {"model", "value_model"}
    assert not any("train/objective/kl" in point for _, point in logger.points)


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        {},
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in ({"beta": 0.0}, {"lora": LORA}, {"value_head_on_policy": True})
        ),
    ],
)
def test_a_checkpoint_loads_and_resumes(make, tmp_path, model):  # noqa: F811
    def run(name, ckpt_path=None, callbacks=None):
        module, data = verified(make, data={"num_iterations": 2}, **model)
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(module, data, max_steps=5, ckpt_path=ckpt_path, **checkpoints).save_checkpoint(tmp_path / name)
        return module

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = run("whole.ckpt", callbacks=[every_step])
    run("resumed.ckpt", tmp_path / "step=3.ckpt")
    assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")
    loaded = RLHFPPO.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    saved = module.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    earlier = RLHFPPO.load_from_checkpoint(tmp_path / "step=3.ckpt", weights_only=True)
    assert (weights(earlier) - weights(loaded)).abs().max() > 0


def test_evaluation_needs_no_reward_model(make, make_trainer, folders):  # noqa: F811
    rows = str(folders / "prompts.jsonl")
    module, data = verified(make, data={"eval_path": rows, "n_eval": 4}, beta=0.0)
    (metrics,) = make_trainer(max_steps=1).validate(module, data, verbose=False)
    assert "eval/pass@1" in metrics and not {"eval/scores", "eval/kl"} & metrics.keys()


def test_a_run_without_any_reward_is_refused(make):  # noqa: F811
    module, data = make(data={"reward_funcs": None}, reward_model_name_or_path=None)
    with pytest.raises(
        UsageError, match="no rewards for the completions; give data.reward_funcs or model.reward_model_name_or_path"
    ):
        fit(module, data, max_steps=1)


def test_weights_must_fit_the_rewards(make):  # noqa: F811
    module, data = verified(make, reward_weights=[1.0])
    with pytest.raises(UsageError, match=r"reward_weights=\[1.0\] are 1 numbers for 2 rewards"):
        fit(module, data, max_steps=1)


SCORES = {"a": 1.0, "b": -0.5}


def value_of_letter(prompts, completions, **columns):
    return [SCORES.get(text, 0.0) for text in completions]


@pytest.mark.slow
def test_a_verifier_alone_leads_to_the_optimum_under_the_price_of_kl(tmp_path):
    """π* ∝ π_ref exp(r/β), with a value model that starts from the policy."""
    tokenizer = letters("ab")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "prompt.jsonl").write_text('{"prompt": "a"}\n' * 997)
    module = RLHFPPO(
        tokenizer_name_or_path=str(tmp_path / "tokenizer"), model_config={**TINY, "initializer_range": 0.5}, beta=0.3,
        max_completion_length=1, whiten_advantages=False, cliprange_value=None, vf_coef=0.5, learning_rate=1e-2,
        local_rollout_forward_batch_size=2048,
    )  # fmt: skip
    data = PromptDataModule(path=str(tmp_path / "prompt.jsonl"), num_generations=1, batch_size=512, num_iterations=2,
                            n_eval=0, reward_funcs=[f"{__name__}:value_of_letter"])  # fmt: skip
    fit(module, data, max_steps=100)
    completions = every_completion(5, 1)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    prompt, reward = tokenizer("a").input_ids, torch.tensor(value_of_letter(None, texts))
    start, learned = (distribution(model, prompt, completions, 1.0) for model in (module.reference, module.model))
    optimum = (start.log() + reward / 0.3).softmax(-1)
    assert 0.5 * (start - optimum).abs().sum() > 0.2
    assert 0.5 * (learned - optimum).abs().sum() <= 0.05
