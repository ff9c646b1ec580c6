"""Generations handed out in minibatches: what each row holds, replacement of silent groups, exact resume."""

import json
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from tokenizers import AddedToken

from datamodules.language.dynamic_sampling import groups_of, has_signal, joined
from datamodules.language.prompt import PromptDataModule
from datamodules.language.rows import joined_sequences
from rl_modules.common.errors import UsageError
from rl_modules.language.grpo import GRPO
from rl_modules.language.policy import LanguagePolicy
from rl_modules.language.sampling import Completions
from rl_modules.language.scoring import completion_log_probs, completion_mask
from rl_modules.language.tokenizer import character_tokenizer
from tests.training import assert_equal_checkpoints, assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip


class Reinforce(LanguagePolicy):
    """The least that learns from a generation; keeps the batches that it was given."""

    temperature, max_completion_length, repetition_penalty = 1.0, 4, 1.0
    top_k = top_p = min_p = None

    def __init__(self, reward=None, **arguments):
        super().__init__(model_config=TINY, lr_scheduler_type="constant", **arguments)
        self.save_hyperparameters(ignore=["reward"])
        self.reward, self.seen, self.rollouts = reward, [], []

    def rewards(self, rollout):
        if self.reward is not None:
            return self.reward(rollout)
        # Depends on what was written, and no two rows have the same.
        return (rollout["tokens"] % 7).float().mean(-1) + 1e-3 * torch.arange(len(rollout["texts"]))

    def prepare(self, rollout):
        self.rollouts.append(rollout)
        names = ("tokens", "prompt_length", "length", "log_prob")
        return {**{name: rollout[name] for name in names}, "mask": completion_mask(rollout["length"]),
                "advantage": rollout["reward"]}  # fmt: skip

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        log_prob, _ = completion_log_probs(self.model, batch["tokens"], batch["prompt_length"], batch["length"])
        loss = -(log_prob.sum(-1) * batch["advantage"]).sum() / batch["step_rows"]
        return loss * batch["n_micro"]


def addition(**arguments):
    defaults = {"batch_size": 8, "num_generations": 4, "eval_steps": 0, "n_train": 12}
    return PromptDataModule("addition", **{**defaults, **arguments})


STATES = []


def reward_of_the_state(completions, trainer_state, **columns):
    STATES.append(trainer_state)
    return [float(trainer_state.global_step)] * len(completions)


def test_reward_functions_written_for_trl_read_where_the_run_stands():
    STATES.clear()
    path = "tests.datamodules.language.test_prompt:reward_of_the_state"
    fit(Reinforce(logging_steps=1), addition(reward_funcs=[path]), max_steps=3)
    assert [(s.global_step, s.max_steps) for s in STATES] == [(0, 3), (1, 3), (2, 3)]
    assert [round(12 * s.epoch) for s in STATES] == [2, 4, 6]
    assert STATES[0].log_history == [] and STATES[2].log_history[-1]["step"] == 2
    STATES.clear()
    fit(Reinforce(), addition(reward_funcs=[path]), max_epochs=2)
    assert [(s.global_step, s.max_steps) for s in STATES] == [(0, 2), (1, 2)]


def of_length(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_with_the_name_of_an_argument_is_refused_before_the_first_generation(streaming, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completions": ["2", "3"]}) + "\n")
    data = PromptDataModule(path=str(path), batch_size=4, num_generations=4, streaming=streaming,
                            reward_funcs=[of_length])  # fmt: skip
    module = GRPO(model_config=TINY, max_completion_length=2)
    module.act = None  # a generation would fail
    with pytest.raises(UsageError, match="a column 'completions'"):
        fit(module, data, max_steps=1)


def test_every_completion_is_handed_out_once_per_pass_with_its_own_numbers():
    model = Reinforce()
    fit(model, addition(steps_per_generation=2, num_iterations=2), max_epochs=1)
    (rollout,) = model.rollouts
    assert len(model.seen) == 4 and [len(batch["tokens"]) for batch in model.seen] == [8] * 4
    place = {float(reward): i for i, reward in enumerate(rollout["reward"])}
    rows_of_pass = [torch.cat([b["advantage"] for b in model.seen[i : i + 2]]) for i in (0, 2)]
    for rows in rows_of_pass:
        assert sorted(rows.tolist()) == sorted(rollout["reward"].tolist())
    assert rows_of_pass[0].tolist() != rows_of_pass[1].tolist(), "each pass has an order of its own"
    for batch in model.seen:
        for row in range(8):
            original = place[float(batch["advantage"][row])]
            n, m = int(batch["prompt_length"][row]), int(batch["length"][row])
            assert batch["tokens"][row, : n + m].tolist() == rollout["tokens"][original, : n + m].tolist()
            assert batch["log_prob"][row, :m].tolist() == rollout["log_prob"][original, :m].tolist()
    assert [batch["on_policy"] for batch in model.seen] == [True, False, False, False]


def test_rows_are_prompt_then_completion_and_the_sampler_said_how_likely_they_are():
    model = Reinforce(learning_rate=0.0)
    fit(model, addition(), max_epochs=1)
    (rollout,) = model.rollouts
    tokenizer = model.tokenizer
    for i, record in enumerate(rollout["records"]):
        n, m = int(rollout["prompt_length"][i]), int(rollout["length"][i])
        assert tokenizer.decode(rollout["tokens"][i, :n]) == record["prompt"]
        assert tokenizer.decode(rollout["tokens"][i, n : n + m], skip_special_tokens=True) == rollout["texts"][i]
        assert (rollout["tokens"][i, n + m :] == tokenizer.pad_token_id).all()
    with torch.no_grad():
        log_prob, _ = completion_log_probs(model.model, rollout["tokens"], rollout["prompt_length"], rollout["length"])
    torch.testing.assert_close(log_prob, rollout["log_prob"], atol=1e-5, rtol=0)


def test_micro_batches_share_the_step_and_are_sorted_by_length():
    model = Reinforce()
    fit(model, addition(), max_epochs=2, accumulate_grad_batches=2)
    for first, second in (model.seen[:2], model.seen[2:]):
        assert first["n_micro"] == 2 and first["step_rows"] == 8 and first["micro_rows"] == 4
        totals = [(b["prompt_length"] + b["length"]) for b in (first, second)]
        assert totals[0].max() <= totals[1].min()
        counted = [float(b["mask"].sum()) for b in (first, second)]
        assert [float(b["micro_tokens"]) for b in (first, second)] == counted
        assert float(first["step_tokens"]) == float(second["step_tokens"]) == sum(counted)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_accumulation_does_not_change_the_step():
    weights = []
    for n_micro in (1, 4):
        model = Reinforce(optimizer=sgd, max_grad_norm=None)
        fit(model, addition(), max_epochs=3, accumulate_grad_batches=n_micro)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=1e-4)


def test_prompts_come_in_a_new_order_every_pass_and_each_once():
    model = Reinforce()
    fit(model, addition(), max_epochs=12)
    prompts = [rollout["records"][i]["prompt"] for rollout in model.rollouts for i in (0, 4)]
    passes = [prompts[:12], prompts[12:]]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) and len(set(passes[0])) == 12


def silent_first_time(rollout):
    """The first of a round's groups has equal rewards."""
    reward = torch.arange(len(rollout["texts"]), dtype=torch.float32)
    reward[:4] = 1.0
    return reward


def test_dynamic_sampling_replaces_groups_without_signal():
    model = Reinforce(reward=silent_first_time)
    data = addition(dynamic_sampling=3, batch_size=16)
    fit(model, data, max_epochs=1)
    (rollout,) = model.rollouts
    # A replacement round of one group is silent too: its bound of three rounds is used up, and one group stays.
    assert data.drawn == 4 + 3
    assert has_signal(rollout["reward"], 4).tolist() == [True, True, True, False]
    for i in range(0, 16, 4):
        assert len({r["prompt"] for r in rollout["records"][i : i + 4]}) == 1
        assert rollout["prompts"][i] == rollout["records"][i]["prompt"]
    assert len(rollout["correct"]) == len(rollout["answers"]) == 4


def test_dynamic_sampling_stops_when_every_group_has_a_signal(capsys):
    rounds = []

    def reward(rollout):
        rounds.append(len(rollout["texts"]))
        values = torch.arange(len(rollout["texts"]), dtype=torch.float32)
        if len(rounds) == 1:
            values[4:8] = torch.nan
        return values

    model = Reinforce(reward=reward)
    fit(model, addition(dynamic_sampling=5, batch_size=16), max_epochs=1)
    assert rounds == [16, 4] and has_signal(model.rollouts[0]["reward"], 4).all()
    assert "without signal" not in capsys.readouterr().out


def test_a_bound_that_is_reached_is_said(capsys):
    fit(Reinforce(reward=lambda r: torch.zeros(len(r["texts"]))), addition(dynamic_sampling=2), max_epochs=1)
    assert "2 of 2 groups are without signal after 2 rounds" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("micro", [1, 2])
def test_a_run_stopped_between_generations_resumes_exactly(tmp_path, micro):
    trainer = {"accumulate_grad_batches": micro}
    assert_resumes_exactly(Reinforce, lambda: addition(steps_per_generation=2), tmp_path, epochs=3, **trainer)


def only_even(completions, number, **columns):
    """Judges the completions of some prompts, as a function of a mixed data set does."""
    return [None if n % 2 else float(len(text)) for text, n in zip(completions, number, strict=True)]


def prompts_of(tmp_path, numbers):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} is", "number": n}) + "\n" for n in numbers))
    return str(path)


def test_special_tokens_that_reward_functions_do_not_see_are_said_once(tmp_path, caplog):
    """An untrained model writes each of its hundred tokens, also pad and unk, of which nothing is said."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken("<code>", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    module = GRPO(model_config=TINY, tokenizer_name_or_path=str(tmp_path), max_completion_length=60)
    fit(module, addition(batch_size=16), max_steps=2)
    (told,) = [message for message in caplog.messages if "which the texts that reward functions" in message]
    assert "the special tokens <code>, which" in told and "completion_ids" in told


@pytest.mark.long
def test_a_generation_that_no_function_judges_stops_no_resumed_run(tmp_path, caplog):
    path = prompts_of(tmp_path, range(4))

    def data():
        return PromptDataModule(path=path, batch_size=4, num_generations=4, reward_funcs=[only_even])

    assert_resumes_exactly(lambda: GRPO(model_config=TINY, max_completion_length=2), data, tmp_path)
    told = [message for message in caplog.messages if "None or NaN, which is no reward, for all 4" in message]
    assert told, "a generation without a reward is said"


@pytest.mark.long
@pytest.mark.parametrize(("numbers", "is_refused"), [([1, 3], True), ([1, 2], False), ([1], False)])
def test_functions_that_give_no_reward_at_all_are_refused_in_the_first_generation(numbers, is_refused, tmp_path):
    size = 4 * len(numbers)
    data = PromptDataModule(path=prompts_of(tmp_path, numbers), batch_size=size, num_generations=4,
                            reward_funcs=[only_even])  # fmt: skip
    module = GRPO(model_config=TINY, max_completion_length=2)
    if not is_refused:
        fit(module, data, max_steps=2)
        return
    with pytest.raises(UsageError, match="reward_funcs=only_even: .* all 8 completions of the first generation"):
        fit(module, data, max_steps=1)


@pytest.mark.long
@pytest.mark.parametrize("micro", [1, 2])
def test_a_run_stopped_within_a_generation_resumes_exactly(tmp_path, micro):
    def run(name, ckpt_path=None, callbacks=None):
        data = addition(steps_per_generation=2, num_iterations=2)
        limits = {"max_steps": 7, "accumulate_grad_batches": micro}
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(Reinforce(), data, ckpt_path=ckpt_path, **limits, **checkpoints).save_checkpoint(tmp_path / name)

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run("whole.ckpt", callbacks=[every_step])
    for step in range(1, 7):
        part = tmp_path / f"step={step}.ckpt"
        stored = torch.load(part, weights_only=True)["PromptDataModule"]["ranks"][0]["fields"]
        assert (stored is None) == (step % 4 == 0), "half-used generations are in the checkpoint, used ones are not"
        run("resumed.ckpt", part)
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("changed", [{"batch_size": 16}, {"num_generations": 2}, {"num_iterations": 1},
                                     {"steps_per_generation": 4}])  # fmt: skip
def test_settings_change_between_generations_and_not_within_one(tmp_path, changed):
    def data(**arguments):
        return addition(**{"steps_per_generation": 2, "num_iterations": 2, **arguments})

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Reinforce(), data(), max_steps=4, callbacks=[every_step], enable_checkpointing=True)
    name = next(iter(changed))
    with pytest.raises(UsageError, match=f"{name}={changed[name]} .it has .*middle of an epoch"):
        fit(Reinforce(), data(**changed), ckpt_path=tmp_path / "step=3.ckpt", max_steps=6)
    resumed = Reinforce()
    fit(resumed, data(**changed), ckpt_path=tmp_path / "step=4.ckpt", max_steps=6)
    assert [len(batch["tokens"]) for batch in resumed.seen] == [changed.get("batch_size", 8)] * 2


@pytest.mark.long
def test_generations_written_ahead_keep_their_settings(tmp_path):
    def run(ckpt_path=None, **arguments):
        model = GRPO(model_config=TINY, max_completion_length=4)
        return fit(model, addition(async_generations=1, **arguments), ckpt_path=ckpt_path, max_steps=2)

    run().save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="num_generations=2 .it has 4.*experience of the next epoch"):
        run(tmp_path / "a.ckpt", num_generations=2)


@pytest.mark.long
def test_lightnings_batch_size_finder_tries_whole_generations(tmp_path):
    model, data = Reinforce(), addition(steps_per_generation=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    Tuner(trainer).scale_batch_size(model, datamodule=data, init_val=4, max_trials=3, steps_per_trial=2)
    assert [len(batch["tokens"]) for batch in model.seen] == [4, 4, 8, 8, 16, 16]
    data.batch_size = 6
    with pytest.raises(UsageError, match="num_generations=4 does not divide"):
        addition(batch_size=6, steps_per_generation=1)
    data.steps_per_generation = 1
    with pytest.raises(UsageError, match="num_generations=4 does not divide"):
        fit(Reinforce(), data)


def test_a_schedule_of_accumulation_is_refused():
    with pytest.raises(UsageError, match="changed accumulate_grad_batches from 1 to 2"):
        fit(Reinforce(), addition(), max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def demonstrated(tmp_path, rows, **arguments):
    """The demonstrations of a file, as texts."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = character_tokenizer()
    source = {"task": "addition"} if "ptx_path" in arguments else {"path": str(path)}
    data = PromptDataModule(**source, batch_size=8, ptx_batch_size=2, n_eval=0, reward_funcs=["exact_answer"],
                            **arguments)  # fmt: skip
    module = SimpleNamespace(tokenizer=tokenizer, max_length=64)
    data.trainer = SimpleNamespace(lightning_module=module, accumulate_grad_batches=1, global_rank=0, world_size=1,
                                   state=SimpleNamespace(fn="fit"))  # fmt: skip
    data.setup("fit")
    sequences = data.demonstrations.sequences
    return tokenizer.batch_decode([[t for t in row if t != tokenizer.pad_token_id] for row in sequences.batch(
        torch.arange(len(sequences)), tokenizer.pad_token_id)["tokens"].tolist()])  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
def test_demonstrations_may_be_numbers_and_messages(tmp_path, named):
    own = {"ptx_path": str(tmp_path / "rows.jsonl")} if named else {}
    found = demonstrated(tmp_path, [
        {"prompt": "2+2=", "completion": 4}, {"prompt": "2+3=", "completion": [{"role": "assistant", "content": "5"}]},
        {"prompt": "2+4=", "completion": "6"},
    ], **own)  # fmt: skip
    assert found == ["2+2=4<eos>", "2+3=5<eos>", "2+4=6<eos>"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("completion", "message"), [
    ([{"role": "assistant", "content": "4"}, {"role": "user", "content": "5"}],
     "'completion' has messages of assistant, user, where the last one should be the assistant's"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
     "the prompts or answers are chat messages, but the tokenizer has no chat template"),
    ({"text": "4"}, "'completion' is dict .*, where text should be"),
])  # fmt: skip
def test_demonstrations_that_are_no_text_are_named(tmp_path, named, completion, message):
    own = {"ptx_path": str(tmp_path / "rows.jsonl")} if named else {}
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "2+3=", "completion": completion}]
    place = r"rows\.jsonl:2" if named else r"rows\.jsonl: record 1"
    with pytest.raises(UsageError, match=f"{place}: {message}"):
        demonstrated(tmp_path, rows, **own)


def test_joined_sequences_by_hand():
    written = Completions(
        tokens=torch.tensor([[5, 1], [6, 0], [7, 8], [1, 0]]), log_prob=torch.zeros(4, 2),
        length=torch.tensor([2, 1, 2, 1]), finished=torch.tensor([True, False, False, True]),
    )  # fmt: skip
    joined = joined_sequences([[9, 9, 9], [3]], written, 2, pad_id=0)
    assert joined["tokens"].tolist() == [[9, 9, 9, 5, 1], [9, 9, 9, 6, 0], [3, 7, 8, 0, 0], [3, 1, 0, 0, 0]]
    assert joined["prompt_length"].tolist() == [3, 3, 1, 1]


def test_signal_ignores_what_was_not_scored():
    nan = float("nan")
    reward = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, 1.0, nan, nan, nan, 2.0, 3.0, nan])
    assert has_signal(reward, 3).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_generations": 3}, "num_generations=3 does not divide"),
        ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        ({"task": None}, "exactly one of task, path and dataset"),
    ],
)
def test_refused_arguments(arguments, sentence):
    settings = {"task": "addition", "batch_size": 8, "num_generations": 4, **arguments}
    with pytest.raises(UsageError, match=sentence):
        PromptDataModule(**settings)


def test_micro_batches_must_divide_the_batch():
    with pytest.raises(UsageError, match="accumulate_grad_batches=3 does not divide batch_size=8"):
        fit(Reinforce(), addition(), max_epochs=1, accumulate_grad_batches=3)


# -------------------------------------------------------------------- widths


def scripted(lengths):
    """``act`` that writes completions of given lengths, a round after the other."""
    rounds = iter(lengths)

    def act(prompts, seeds, num_generations=1, **sampling):
        length = torch.tensor(next(rounds))
        assert len(length) == len(prompts) * num_generations
        width = int(length.max())
        mask = torch.arange(width) < length.unsqueeze(1)
        return Completions(torch.where(mask, 5, 0), torch.where(mask, -1.0, 0.0), length, length < 4)

    return act


def silent_where_long(prompts, completions, completion_ids, **columns):
    """Equal rewards where completions have four tokens, different ones elsewhere."""
    return [1.0 if len(ids) == 4 else float(i) for i, ids in enumerate(completion_ids)]


LONG_GROUP_REPLACED = [[3, 2, 3, 1] + [4] * 4, [2, 3, 3, 1]]


@pytest.mark.parametrize(("model", "trainer", "data"), [
    ({"beta": 0.1}, {"accumulate_grad_batches": 2}, {}),
    ({"beta": 0.1}, {"accumulate_grad_batches": 4}, {"num_iterations": 2}),
    ({"top_k": 5}, {}, {"num_iterations": 2}),
    ({}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, {"num_iterations": 2}),
    ({"beta": 0.1, "top_entropy_quantile": 0.5}, {"accumulate_grad_batches": 2}, {}),
], ids=str)  # fmt: skip
def test_a_replaced_group_may_have_had_the_longest_completion(model, trainer, data):
    module = GRPO(model_config=TINY, max_completion_length=4, completions_steps=0, **model)
    module.act = scripted(LONG_GROUP_REPLACED)
    batches, inner = [], module.training_step

    def noting(batch, batch_idx):
        batches.append(batch)
        return inner(batch, batch_idx)

    module.training_step = noting
    source = addition(dynamic_sampling=1, reward_funcs=[f"{__name__}:silent_where_long"], **data)
    fit(module, source, max_epochs=1, **trainer)
    assert len(batches) == trainer.get("accumulate_grad_batches", 1) * data.get("num_iterations", 1)
    for batch in batches:
        longest, widest = int(batch["length"].max()), int((batch["prompt_length"] + batch["length"]).max())
        assert longest <= 3
        for name in ("mask", "log_prob", "ref_log_prob"):
            assert name not in batch or batch[name].shape == (len(batch["tokens"]), longest), name
        assert batch["tokens"].shape[1] == widest


@given(st.lists(st.integers(1, 6), min_size=12, max_size=12), st.permutations(range(3)), st.integers(0, 4))
def test_groups_chosen_from_two_rounds_are_as_wide_as_their_longest_row(lengths, order, columns):
    """Whatever is joined and chosen: each row keeps its own numbers, and no column stands behind the longest row."""

    def rollout(lengths, first):
        length, prompt_length = torch.tensor(lengths), torch.tensor([1 + i % 3 for i in range(len(lengths))])
        total, width = prompt_length + length, int(length.max())
        number = torch.arange(first, first + len(lengths)).unsqueeze(1)
        return {
            "tokens": torch.where(torch.arange(int(total.max())) < total.unsqueeze(1), number + 1, 0),
            "log_prob": torch.where(torch.arange(width) < length.unsqueeze(1), number + 1.0, 0.0),
            "prompt_length": prompt_length, "length": length, "rewards": number.expand(-1, columns).float(),
            "reward": number.squeeze(1).float(), "texts": [str(i) for i in number.squeeze(1).tolist()],
            "answers": [[str(i)] for i in range(first // 4, (first + len(lengths)) // 4)],
            "reward_names": ["f"] * columns,
        }  # fmt: skip

    both = joined(rollout(lengths[:8], 0), rollout(lengths[8:], 8))
    chosen = groups_of(both, list(order)[:2], 4)
    rows = [g * 4 + j for g in order[:2] for j in range(4)]
    assert chosen["texts"] == [str(i) for i in rows] and chosen["answers"] == [[str(g)] for g in order[:2]]
    assert chosen["reward"].tolist() == chosen["tokens"][:, 0].sub(1).tolist() == [float(i) for i in rows]
    assert chosen["rewards"].shape == (8, columns)
    assert chosen["length"].tolist() == [lengths[i] for i in rows]
    assert chosen["log_prob"].shape[1] == int(chosen["length"].max())
    assert chosen["tokens"].shape[1] == int((chosen["prompt_length"] + chosen["length"]).max())
    assert (chosen["log_prob"] > 0).sum(1).tolist() == chosen["length"].tolist()


def test_fields_of_several_numbers_per_token_are_joined_at_any_width():
    parts = [torch.rand(rows, width, 2) for rows, width in ((2, 3), (4, 5))]
    both = joined({"token_rewards": parts[0]}, {"token_rewards": parts[1]})["token_rewards"]
    assert both.shape == (6, 5, 2) and not both[:2, 3:].any()
    torch.testing.assert_close(both[:2, :3], parts[0])
    torch.testing.assert_close(both[2:], parts[1])
