"""The model card of an upload or an export: what was trained, with which command, and what it reached."""

from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from typing import Any

import yaml

#: Packages whose versions a card names.
PACKAGES = ("lightning-rl-recipes", "torch", "lightning")


def model_card(
    name: str,
    summary: str,
    *,
    task_type: str,
    dataset: str,
    results: Mapping[str, float | str],
    settings: Mapping[str, Any],
    command: str,
    usage: str,
    tags: Sequence[str] = (),
    base_model: str | None = None,
    packages: Sequence[str] = PACKAGES,
) -> str:
    """Returns the text of a README.md with the metadata that the Hugging Face Hub reads.

    Args:
        name: of the model, as in ``PPO-CartPole-v1``.
        summary: one sentence: what the model is.
        task_type: the Hub's name of the task: ``reinforcement-learning``, ``text-generation``.
        dataset: the environment or data set that the results are of.
        results: values by metric, such as ``{"mean_reward": "500.0 +/- 0.0"}``; empty: not evaluated.
        settings: what the run was given.
        command: the shell command that trains the model.
        usage: Python that loads it.
        tags: beside the library's name and the task.
        base_model: the model on the Hub that training started from.
        packages: those whose installed versions are named.
    """
    from huggingface_hub import EvalResult, ModelCardData

    data = ModelCardData(
        library_name="lightning-rl-recipes",
        tags=[*dict.fromkeys((task_type, *tags))],
        pipeline_tag=task_type,
        base_model=base_model,
        model_name=name,
        eval_results=[EvalResult(task_type, dataset, dataset, metric, value) for metric, value in results.items()]
        or None,
    )
    plain = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True).rstrip("\n")
    rows = "\n".join(f"| {metric} | {value} |" for metric, value in results.items())
    installed = {found.name: found.version for found in distributions()}  # a checkout may be none of them
    versions = ", ".join(f"{package} {installed[package]}" for package in packages if package in installed)
    return "\n\n".join(
        [
            f"---\n{data.to_yaml()}\n---",
            f"# {name}",
            summary,
            f"## Result\n\n| metric on {dataset} | value |\n|---|---|\n{rows}" if rows else "It was not evaluated.",
            f"## Use\n\n```python\n{usage}\n```",
            f"## Train\n\n```bash\n{command}\n```\n\nSettings:\n\n```yaml\n{plain}\n```",
            f"Versions: {versions}. The licence is not stated: add `license:` to the metadata above.\n",
        ]
    )
