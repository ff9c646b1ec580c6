"""Dialogues with environments: the model's own tokens are kept, the environment's are read and not learned."""

import pytest
import torch

from rl_modules.language.sampling.native import NativeSampler
from rl_modules.language.sampling.protocol import SamplingSettings
from rl_modules.language.sampling.support import kept_lists
from rl_modules.language.sampling.turns import Further, by_turns
from tests.datamodules.language.dialogue_cases import ALGORITHMS, data_of, folder_of_tokenizer, module_of
from tests.rl_modules.language.sampler_cases import tiny_model
from tests.training import fit


def rollouts_of(module):
    """What the module's ``prepare`` got and returned."""
    seen, prepare = [], module.prepare

    def spy(rollout):
        fields = prepare(rollout)
        seen.append((rollout, fields))
        return fields

    module.prepare = spy
    return seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("environment", ["Count", "Later"])
def test_a_run_in_turns_counts_what_the_model_wrote(tmp_path, algorithm, environment):
    module = module_of(ALGORITHMS[algorithm], folder_of_tokenizer(tmp_path / "tokenizer"))
    seen = rollouts_of(module)
    fit(module, data_of(environment, num_generations=4), max_steps=2)
    tokenizer = module.tokenizer
    for rollout, fields in seen:
        for row, dialogue in enumerate(rollout["dialogues"]):
            assert dialogue["ended"] == "done"
            start, n = int(rollout["prompt_length"][row]), int(rollout["length"][row])
            ids = rollout["tokens"][row, start : start + n].tolist()
            own = rollout["written"][row, :n]
            # What is not written is the template's rendering of the environment's messages.
            text = tokenizer.decode(rollout["tokens"][row, :start].tolist())
            talk = [{"role": "user", "content": dialogue["prompt"][0]["content"]}]
            assert text == f"u:{talk[0]['content']}\n>"
            column = 0
            for k, message in enumerate(dialogue["messages"]):
                if message["role"] == "assistant":
                    part = [i for i in range(column, n) if int(rollout["turn"][row, i]) == k // 2 and own[i]]
                    assert part == list(range(part[0], part[-1] + 1))
                    assert tokenizer.decode([ids[i] for i in part], skip_special_tokens=True) == message["content"]
                    column, ended = part[-1] + 1, ids[part[-1]] == tokenizer.eos_token_id
                    letters = sum(c.isalpha() for c in message["content"])
                    reward = letters / max(1, len(message["content"]))
                    assert float(rollout["turn_reward"][row, part[-1]]) == pytest.approx(reward)
                else:
                    stop = column
                    while not own[stop]:
                        stop += 1
                    end = "\n" if ended else "<eos>\n"
                    assert tokenizer.decode(ids[column:stop]) == f"{end}u:{message['content']}\n>"
                    column = stop
            assert column == n
        assert torch.equal(fields["mask"], rollout["written"])
        assert not rollout["log_prob"][~rollout["written"]].any()
        total = rollout["turn_reward"].sum(1)
        assert torch.allclose(rollout["rewards"][:, -1], total)


class Scripted:
    """A partner that answers row i's turn k with given tokens, some of them late."""

    patience_s = 0.0

    def __init__(self, rows, turns, limit, late=()):
        self.limits, self.turns, self.late, self.limit = [limit] * rows, turns, set(late), limit
        self.counts, self.asked, self.calls = [0] * rows, {}, 0

    @property
    def waiting(self):
        return len(self.asked)

    def ended(self, row, tokens, finished):
        self.counts[row] += 1
        self.asked[row] = self.calls + (3 + row % 3 if row in self.late else 0)

    def take(self, patience_s):
        self.calls += 1
        there = sorted(row for row, call in self.asked.items() if patience_s is None or call <= self.calls)
        found = []
        for row in there:
            del self.asked[row]
            k = self.counts[row]
            tokens = [(7 * row + 3 * k + j) % 20 + 2 for j in range(1 + (row + k) % 4)]
            over = k >= self.turns + row % 2
            found.append(Further(row, tokens, 1000 * k + row, 0 if over else self.limit, over))
        return found


@pytest.mark.parametrize("late", [(), (0, 3, 4), range(12)], ids=["at once", "some late", "all late"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3}, {"temperature": 0.7, "top_k": 20, "return_sampling_mask": True}],
    ids=str,
)
@pytest.mark.parametrize(("fast", "at_once"), [("1", None), ("0", None), ("1", 5)])
def test_kept_keys_change_no_token(tmp_path, monkeypatch, late, settings, fast, at_once):
    """The native sampler's own way of turns writes what a completion per turn writes, each read from its beginning."""
    monkeypatch.setenv("RL_FAST", fast)
    torch.manual_seed(0)
    model = tiny_model()
    prompts = [[5 + i // 4, 6, 7, *range(8, 8 + i // 4)] for i in range(12)]
    seeds = list(range(12))
    own = SamplingSettings(40, (1,), 0, **settings)
    sampler = NativeSampler(model, max_rows_in_flight=at_once)
    written = sampler.converse(prompts, seeds, own, Scripted(12, 3, 5, late))
    again = by_turns(sampler, prompts, seeds, own, Scripted(12, 3, 5, late))
    assert written is not None and int(written.turn.max()) == 3
    for name in ("tokens", "length", "finished", "written", "turn"):
        assert torch.equal(getattr(written, name), getattr(again, name)), name
    torch.testing.assert_close(written.log_prob, again.log_prob, atol=1e-5, rtol=1e-4)
    assert (written.kept is not None) == ("top_k" in settings)
    if written.kept is not None:
        assert torch.equal(written.kept_count, again.kept_count)
        assert torch.equal(written.kept_count > 0, written.written)
        ordered = [[set(ids) for ids in row] for row in kept_lists(written)]
        assert ordered == [[set(ids) for ids in row] for row in kept_lists(again)]
