"""Dialogues with environments: the model's own tokens are kept, the environment's are read and not learned."""

import pytest
import torch

from tests.datamodules.language.dialogue_cases import ALGORITHMS, data_of, folder_of_tokenizer, module_of
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
