"""Runs of dialogues: gradients, advantages per turn, failures, workers, evaluation, exact resume."""

import math

import lightning as L
import pytest
import torch

from datamodules.language.prompt import PromptDataModule
from recipes.cli.recomputation import dialogue_in
from rl_modules import functional as F
from rl_modules.common.errors import UsageError
from rl_modules.language.grpo import GRPO
from rl_modules.language.rlhf_ppo import RLHFPPO
from tests.datamodules.language.dialogue_cases import ALGORITHMS, HERE, TINY, data_of, folder_of_tokenizer, module_of
from tests.datamodules.language.test_turns import rollouts_of
from tests.training import assert_resumes_exactly, fit


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


@pytest.fixture
def folder(tmp_path):
    return folder_of_tokenizer(tmp_path / "tokenizer")


def test_the_gradient_is_that_of_the_dialogue_as_one_text(folder):
    """One step of REINFORCE with the group's baseline, by hand: every dialogue is fed as a text of its tokens."""
    module = module_of(GRPO, folder, optimizer=sgd, lr_scheduler_type="constant", learning_rate=1.0,
                       scale_rewards="none")  # fmt: skip
    seen, before = [], {}

    class Keeps(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            before.update({name: p.detach().clone() for name, p in module.model.named_parameters()})

    seen = rollouts_of(module)
    fit(module, data_of(), max_steps=1, callbacks=[Keeps()])
    rollout, _ = seen[0]
    after = weights_of(module)
    with torch.no_grad():
        for name, p in module.model.named_parameters():
            p.copy_(before[name])
    module.zero_grad()
    module.eval()
    reward = rollout["turn_reward"].sum(1).view(-1, 4)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    loss = torch.zeros(())
    for row, a in enumerate(advantage):
        begin, n = int(rollout["prompt_length"][row]), int(rollout["length"][row])
        text = rollout["tokens"][row, : begin + n]
        log_prob = module.model(input_ids=text[None]).logits[0].log_softmax(-1)
        for j in range(n):
            if rollout["written"][row, j]:
                loss = loss - a * log_prob[begin + j - 1, text[begin + j]]
    (loss / int(rollout["written"].sum())).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.model.parameters()])
    moved = torch.cat([x.flatten() for x in before.values()]) - after
    assert float(gradient.norm()) > 1e-3
    torch.testing.assert_close(moved, gradient, atol=1e-6, rtol=2e-3)


@pytest.mark.parametrize("gamma", [1.0, 0.5, -1.0])
def test_advantages_per_turn_are_of_what_is_still_earned(folder, gamma):
    module = module_of(GRPO, folder, reward_to_go=True, turn_gamma=gamma, scale_rewards="none")
    seen = rollouts_of(module)
    fit(module, data_of("Short"), max_steps=1)
    rollout, fields = seen[0]
    rewards = [dialogue["rewards"] for dialogue in rollout["dialogues"]]
    assert len({len(row) for row in rewards}) > 1
    for row, own in enumerate(rewards):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        for k in range(len(own)):
            returns = [math.fsum(gamma**j * earned for j, earned in enumerate(other[k:])) for other in group]
            expected = returns[row % 4] - sum(returns) / 4
            places = rollout["written"][row] & (rollout["turn"][row] == k)
            assert fields["advantage"][row][places].tolist() == pytest.approx([expected] * int(places.sum()), abs=1e-5)
    with pytest.raises(UsageError, match="reward_to_go=true needs dialogues"):
        fit(module_of(GRPO, folder, reward_to_go=True), data_of(environment=None, max_turn_tokens=None,
                                                                reward_funcs=None), max_steps=1)  # fmt: skip


def test_the_critic_looks_from_turn_to_turn(folder):
    """GAE of a dialogue is that of its written tokens alone, each turn's reward on its last one."""
    module = module_of(RLHFPPO, folder, whiten_advantages=False, beta=0.0, lam=0.8, gamma=0.9)
    seen = rollouts_of(module)
    fit(module, data_of(num_generations=1), max_steps=1)
    rollout, fields = seen[0]
    for row in range(len(rollout["length"])):
        own = rollout["written"][row]
        value, reward = fields["value"][row][own], rollout["turn_reward"][row][own]
        expected, following = [], 0.0
        for t in reversed(range(len(value))):
            next_value = float(value[t + 1]) if t + 1 < len(value) else 0.0
            following = float(reward[t]) + 0.9 * next_value - float(value[t]) + 0.9 * 0.8 * following
            expected.insert(0, following)
        assert fields["advantage"][row][own].tolist() == pytest.approx(expected, abs=1e-5)
        assert not fields["advantage"][row][~own].any()
    assert F.masked_mean(rollout["turn_reward"], rollout["written"]) > 0


@pytest.mark.parametrize(("workers", "rows"), [(0, 32), pytest.param(2, 12, marks=pytest.mark.slow)])
def test_a_failing_environment_costs_its_dialogue(folder, workers, rows):
    module = module_of(GRPO, folder)
    seen = rollouts_of(module)
    fit(module, data_of("Fragile", env_timeout_s=0.2, env_workers=workers, batch_size=rows), max_steps=1)
    rollout, fields = seen[0]
    for row, dialogue in enumerate(rollout["dialogues"]):
        failed = dialogue["ended"] == "failed"
        assert math.isnan(float(rollout["reward"][row])) == failed
        assert failed == bool(dialogue["error"])
        if failed:
            assert not fields["advantage"][row].any() and not fields["keep"][row]
    errors = {dialogue["error"] for dialogue in rollout["dialogues"]}
    assert any("ValueError: broken" in error for error in errors) and any("longer than 0.2 s" in e for e in errors)
    mean, count = rollout["logged"]["environment/failed"]
    assert count == rows and 0.2 < mean < 0.9


def test_an_environment_that_always_fails_ends_the_run(folder):
    with pytest.raises(UsageError, match=r"environment .*Broken.: reset raised .*never.* in each of the first 16"):
        fit(module_of(GRPO, folder), data_of("Broken"), max_steps=1)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"environment": f"{HERE}:TINY"}, "has no reset and no step"),
    ({"environment": f"{HERE}:Nothing"}, "has no 'Nothing'"),
    ({"environment_kwargs": {"turn": 3}}, "has no setting 'turn'"),
    ({"environment": f"{HERE}:Moody"}, r"reset returned other messages for the same record.*start_seed"),
    ({"environment": f"{HERE}:Talks"}, r"opens a dialogue with 3\d+ tokens, the model takes"),
], ids=["no class", "missing", "settings", "openings", "too long"])  # fmt: skip
def test_what_is_no_environment_is_a_sentence(folder, arguments, message):
    config = {"model_config": {**TINY, "max_position_embeddings": 256}}
    with pytest.raises(UsageError, match=message):
        fit(module_of(GRPO, folder, **config), data_of(**arguments), max_steps=1)


def test_reward_overlap_and_a_tokenizer_without_a_template_are_refused(tmp_path):
    with pytest.raises(UsageError, match="reward_overlap=true scores completions one by one"):
        data_of(reward_overlap=True)
    with pytest.raises(UsageError, match="the tokenizer has no chat template"):
        fit(module_of(GRPO, None), data_of(), max_steps=1)


def test_limits_end_dialogues(folder):
    module = module_of(GRPO, folder, mask_truncated_completions=True)
    seen = rollouts_of(module)
    fit(module, data_of(max_turns=2), max_steps=1)
    rollout, fields = seen[0]
    assert {d["ended"] for d in rollout["dialogues"]} == {"max_turns"} and not rollout["finished"].any()
    assert not fields["mask"].any()
    module = module_of(GRPO, folder, max_completion_length=16)
    seen = rollouts_of(module)
    fit(module, data_of(), max_steps=1)
    rollout, _ = seen[0]
    assert int(rollout["length"].max()) <= 16 and "length" in {d["ended"] for d in rollout["dialogues"]}


def test_a_dialogue_whose_last_message_is_cut_is_truncated(folder):
    """Each of 64 dialogues ends after two turns of two characters; the expectation is their last token."""
    module = module_of(GRPO, folder, mask_truncated_completions=True)
    seen = rollouts_of(module)
    trainer = fit(module, data_of(batch_size=64, max_turn_tokens=2, environment_kwargs={"turns": 2}), max_steps=1)
    (rollout, fields), eos = seen[0], module.tokenizer.eos_token_id
    last = rollout["tokens"][torch.arange(64), rollout["prompt_length"] + rollout["length"] - 1]
    assert {dialogue["ended"] for dialogue in rollout["dialogues"]} == {"done"}
    assert torch.equal(rollout["finished"], last == eos) and int(rollout["finished"].sum()) < 8
    assert torch.equal(fields["mask"].any(1), last == eos)
    share = 1 - (last == eos).float().mean().item()
    metrics = trainer.callback_metrics
    for name in ("train/completions/clipped_ratio", "train/environment/truncated"):
        assert float(metrics[name]) == pytest.approx(share)


def test_an_evaluation_plays_dialogues(folder):
    data = data_of(n_eval=8, eval_steps=1, eval_on_start=False, eval_temperature=1.0, correct_threshold=0.1)
    module = module_of(GRPO, folder)
    trainer = fit(module, data, max_steps=1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["eval/environment/turns"] == 3 and 0 < metrics["eval/rewards/environment"] <= 3
    assert isinstance(data, PromptDataModule)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("algorithm", [pytest.param(name, marks=[] if name == "GRPO" else pytest.mark.long)
                                       for name in ALGORITHMS])  # fmt: skip
def test_a_run_of_dialogues_resumes_exactly(folder, tmp_path, algorithm, ahead):
    """Answers come within the patience, so that the rows that are decoded together are the same again."""
    if algorithm == "RLHFPPO" and ahead:
        pytest.skip("RLHFPPO does not correct for older weights")

    def data():
        return data_of(env_patience_s=5.0, batch_size=8, steps_per_generation=2, async_generations=ahead)

    def module():
        return module_of(ALGORITHMS[algorithm], folder, lr_scheduler_type="constant")

    assert_resumes_exactly(module, data, tmp_path, epochs=3)


def test_filters_hold_in_every_turn(folder):
    """Training's log-probabilities are those of sampling, with filters and a penalty on what the dialogue has."""
    module = module_of(GRPO, folder, top_k=5, repetition_penalty=1.2)
    seen = rollouts_of(module)
    fit(module, data_of(), max_steps=1)
    rollout, fields = seen[0]
    own = rollout["written"]
    torch.testing.assert_close(fields["log_prob"][own], rollout["log_prob"][own], atol=1e-4, rtol=1e-4)


def test_a_resumed_run_says_that_an_environment_begins_anew(folder, tmp_path, caplog):
    arguments = {"num_generations": 4, "batch_size": 8}
    path = tmp_path / "a.ckpt"
    fit(module_of(GRPO, folder), data_of("Outside", **arguments), max_steps=1).save_checkpoint(path)
    assert not caplog.messages
    fit(module_of(GRPO, folder), data_of("Outside", **arguments), ckpt_path=path, max_steps=2)
    assert any("Outside is not replayable: dialogues that had begun begin anew" in text for text in caplog.messages)


def test_a_minibatch_shows_its_dialogue(folder):
    module = module_of(GRPO, folder)
    seen = rollouts_of(module)
    fit(module, data_of(), max_steps=1)
    rollout, fields = seen[0]
    text = dialogue_in(fields, module.tokenizer)
    dialogue = rollout["dialogues"][0]
    written = [m["content"] for m in dialogue["messages"] if m["role"] == "assistant"]
    own = [part.partition("«")[0].removesuffix("<eos>") for part in text.split("»")[1:]]
    assert [part.replace("<pad>", "").replace("<unk>", "") for part in own] == written
    assert "u:1/" in text and dialogue_in({"tokens": fields["tokens"]}, module.tokenizer) is None
