"""Golden files: what the project does today, to judge a rebuilding by.

python -m benchmarks.golden write              writes tests/golden/*.json
python -m benchmarks.golden compare            compares with them; exit code 1 where anything differs
python -m benchmarks.golden compare runs sac/  one part; of the runs and refusals those whose names contain a word
python -m benchmarks.golden speed BEFORE       times this checkout against another, in interleaved pairs

- **signatures**: names, defaults and annotations of all public classes and of the functional core.
- **help**: what ``rl fit --model CLASS --help`` prints for each of them.
- **refusals**: the sentence for every case of ``tests/bad_inputs.py``.
- **runs**: each shipped config is trained for some hundred transitions (a language model for four steps), in its first
  half to a checkpoint and from there to the end. Compared are the leaves of the last checkpoint, the weights and the
  curves. The halved run must equal the whole one.

Digests of weights are those of one processor and one version of torch. On another, only the names, types and shapes of
the leaves and the curves' tags are compared; write the files of the earlier commit there first.
"""

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
#: Curves of the clock, which no two runs share.
CLOCKS = re.compile(r"time/(fps|time_elapsed)|.*_per_second|perf/.*")
REPLAYS = ("dqn", "qrdqn", "c51", "ddpg", "td3", "sac", "tqc", "crossq")
LANGUAGE = re.compile(r"class_path: (Instruction|Preference|Prompt)DataModule")


def public() -> Iterator[tuple[str, Any]]:
    """The public classes and functions by their import path."""
    for package in ("rl_modules", "datamodules", "rl_modules.functional"):
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield f"{package}.{name}", getattr(module, name)


def signatures() -> dict[str, list[str]]:
    found = {}
    for name, thing in public():
        with contextlib.suppress(TypeError, ValueError):
            function = thing.__init__ if inspect.isclass(thing) else thing
            parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
            found[name] = [re.sub(r"0x[0-9a-f]+", "…", str(p)) for p in parameters]
    return found


def help_texts() -> dict[str, list[str]]:
    """What the command line prints for each algorithm and each datamodule."""
    from lightning.pytorch import LightningDataModule, LightningModule

    found = {}
    for name, thing in public():
        kind = "model" if inspect.isclass(thing) and issubclass(thing, LightningModule) else "data"
        if inspect.isclass(thing) and issubclass(thing, LightningModule | LightningDataModule):
            found[name] = printed(["fit", f"--{kind}", name.rpartition(".")[2], "--help"])[0].splitlines()
    return found


def printed(words: list[str]) -> tuple[str, str]:
    """What a command of ``rl`` prints to its standard output and error."""
    from recipes.cli import main

    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["rl"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            main(words)
    finally:
        sys.argv = argv
    return out.getvalue(), err.getvalue()


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A working directory of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


# ---------------------------------------------------------------- refusals


def refusals(words: list[str]) -> dict[str, str]:
    """The sentence that answers each bad input."""
    from tests.bad_inputs import ADDITION, CARTPOLE, CASES, Place

    found = {}
    with tempfile.TemporaryDirectory() as trained:
        small = "--model.model_config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1}"
        for command in ([*CARTPOLE], [*ADDITION, small]):
            printed([*command, "--trainer.default_root_dir", trained])
        control, language = (
            str(next(Path(trained).glob(f"logs/{name}-*/version_0/checkpoints/last.ckpt"))) for name in ("PPO", "SFT")
        )
        for case in CASES:
            if not any(word in case.name for word in words or [""]):
                continue
            known, path = set(sys.modules), list(sys.path)
            with empty_folder() as folder:
                for name, content in case.files.items():
                    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
                try:
                    if callable(case.run):
                        case.run(Place(folder, control, language))
                        sentence = "accepted"
                    else:
                        command = [w.replace("{control}", control).replace("{language}", language) for w in case.run]
                        error = printed(command)[1]
                        sentence = error[error.index("error: ") :] if "error: " in error else "no sentence: " + error
                except Exception as error:
                    sentence = f"{type(error).__name__}: {error}"
                for place, name in ((str(folder), "FOLDER"), (trained, "TRAINED")):
                    sentence = sentence.replace(place, name)
                found[case.name] = re.sub(r"0x[0-9a-f]+|/tmp/\S+", "…", sentence.strip())
                for name in set(sys.modules) - known:  # the next case may have a module of the same name
                    if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                        del sys.modules[name]
                sys.path[:] = path
    return found


# ---------------------------------------------------------------- runs


def machine() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def settings_of_run(name: str) -> tuple[list[str], str, int]:
    """The options that make a config short, the option that ends it, and its length."""
    import yaml

    from recipes import configs

    text = (configs.CONFIGS / name).read_text(encoding="utf-8")
    common = ["--trainer.accelerator=cpu", "--checkpoint.interval_s=1000"]
    if LANGUAGE.search(text):
        return [*common, "--data.n_train=64", "--data.batch_size=16", "--data.n_eval=4"], "--trainer.max_steps", 4
    control = [*common, "--data.eval_freq=0", "--data.n_test_episodes=1"]
    if name.partition("/")[0] in REPLAYS:
        settings = yaml.safe_load(text)["data"].get("init_args", {})
        every = settings.get("train_freq", 1)
        every = every[0] if isinstance(every, list) else every
        updates = min(settings.get("gradient_steps", 1), 8)
        return [*control, "--data.learning_starts=100", "--data.buffer_size=1000", f"--data.gradient_steps={updates}",
                f"--data.rollouts_per_epoch={max(1, 50 // every)}"], "--trainer.max_epochs", 4  # fmt: skip
    return [*control, "--trainer.limit_train_batches=60"], "--trainer.max_epochs", 2


def make_models(name: str) -> None:
    """Writes the models of earlier stages that a config begins with, small and untrained."""
    import yaml

    from recipes import configs
    from rl_modules import SFT, RewardModel

    settings = yaml.safe_load((configs.CONFIGS / name).read_text("utf-8"))["model"].get("init_args", {})
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2}  # fmt: skip
    for cls, argument in ((SFT, "model_name_or_path"), (RewardModel, "reward_model_name_or_path")):
        if str(settings.get(argument)).startswith("runs/"):
            model = cls(model_config=small)
            model.configure_model()
            model.export(settings[argument])


def run(name: str) -> dict[str, Any]:
    """Trains one config whole, and in two halves; returns the digests of what it leaves."""
    options, bound, length = settings_of_run(name)
    results = []
    for ends in ([length], [length // 2, length]):
        with empty_folder():
            make_models(name)
            for end in ends:
                error = printed(["fit", "--config", name, *options, f"{bound}={end}", "--resume"])[1]
            last = next(Path().glob("logs/*/*/checkpoints/last.ckpt"), None)
            if last is None:
                return {"skipped": error.strip().splitlines()[-1][:200] if error.strip() else "no checkpoint"}
            results.append(digests(last))
    whole, halved = results
    parts = ("weights", "leaves", "curves")
    return {**whole, "resumes": [part for part in parts if whole[part] != halved[part]] or "identical"}


def digests(last: Path) -> dict[str, Any]:
    """What a run left: its weights, its checkpoint's leaves by group, and its curves."""
    import torch

    from recipes.callbacks import curves
    from tests.training import tensors_of

    checkpoint = torch.load(last, weights_only=True)
    # Frozen models of earlier stages are in a temporary folder.
    leaves = {path: leaf for path, leaf in tensors_of(checkpoint).items() if not path.endswith("./path")}
    groups: dict[str, list[str]] = {}
    for path in sorted(leaves):
        first, second = [*path.split("/")[1:], ""][:2]
        groups.setdefault(first if first.endswith("parameters") else f"{first}/{second}", []).append(path)
    return {
        "weights": digest({path: leaves[path] for path in sorted(leaves) if path.startswith("/state_dict/")}),
        "leaves": {
            group: [len(paths), digest({p: form(leaves[p]) for p in paths}), digest({p: leaves[p] for p in paths})]
            for group, paths in groups.items()
            if not group.startswith("state_dict/")
        },
        "curves": {
            tag: digest(points if not CLOCKS.match(tag) else [step for step, _ in points])
            for tag, points in sorted(curves.points(last.parents[1]).items())
        },
    }


def form(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def digest(value: Any) -> str:
    """Eight digits that change with any bit of a nested value."""
    import torch

    hashed = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, dict):
            for key, item in x.items():
                hashed.update(str(key).encode())
                add(item)
        elif isinstance(x, list | tuple):
            for item in x:
                add(item)
        elif isinstance(x, torch.Tensor):
            hashed.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
        else:
            hashed.update(repr(x).encode())

    add(value)
    return hashed.hexdigest()[:8]


def runs(words: list[str]) -> dict[str, Any]:
    from recipes import configs

    names = [name for name in configs.names() if any(word in name for word in words or [""])]
    found = {}
    for name in names:
        began_s = time.monotonic()
        found[name] = run(name)
        what = found[name].get("skipped") or found[name]["resumes"]
        print(f"{name:40} {time.monotonic() - began_s:6.1f} s  {what}", file=sys.stderr, flush=True)
    return {"machine": machine(), "runs": found}


# ---------------------------------------------------------------- writing and comparing

PARTS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "signatures": lambda words: signatures(),
    "help": lambda words: help_texts(),
    "refusals": refusals,
    "runs": runs,
}


def differences(part: str, golden: dict[str, Any], now: dict[str, Any], only: bool) -> list[str]:
    """Sentences that say what differs.

    Args:
        part: of the golden files.
        golden: its content.
        now: what the checkout gives.
        only: whether ``now`` has some of the names alone.
    """
    if part == "runs":
        same = golden["machine"] == now["machine"]
        if not same:
            print(f"golden runs are of {golden['machine']}, this is {now['machine']}: only names, types and shapes "
                  "count", file=sys.stderr)  # fmt: skip
        golden, now = golden["runs"], now["runs"]
        if not same:
            golden, now = ({name: structure(run) for name, run in x.items()} for x in (golden, now))
    found = [] if only else [f"{part}: {name} is gone" for name in golden.keys() - now.keys()]
    for name, value in now.items():
        if name not in golden:
            found.append(f"{part}: {name} is new")
        elif value != golden[name]:
            found.append(f"{part}: {name}: {changes(golden[name], value)}")
    return found


def text_of(golden: dict[str, Any]) -> str:
    """JSON with a line for each name, two levels deep at most."""

    def dumped(key: str, value: Any) -> str:
        if key == "runs":
            return "{\n" + ",\n".join(f" {json.dumps(k)}: {dumped('', v)}" for k, v in value.items()) + "\n}"
        return json.dumps(value, ensure_ascii=False, indent=1 if isinstance(value, list) else None)

    lines = [f"{json.dumps(key)}: {dumped(key, value)}" for key, value in golden.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def structure(run: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's digests that is the same on every processor."""
    if "skipped" in run:
        return run
    return {"leaves": {group: x[:2] for group, x in run["leaves"].items()}, "curves": list(run["curves"]),
            "resumes": run["resumes"]}  # fmt: skip


def changes(before: Any, after: Any) -> str:
    """What changed between two values, in short."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return "; ".join(f"{key}: {changes(before.get(key), after.get(key))}" for key in keys)
    if isinstance(before, list) and isinstance(after, list) and all(isinstance(x, str) for x in before + after):
        gone, new = [x for x in before if x not in after], [x for x in after if x not in before]
        return f"- {gone} + {new}" if gone or new else "another order"
    return f"{before!r} → {after!r}"


# ---------------------------------------------------------------- speed

#: Commands whose seconds are compared; each prints nothing that matters.
SPEED = {
    "ppo": ["fit", "--config", "ppo/cartpole.yaml", "--data.total_timesteps=60000", "--data.eval_freq=0"],
    "a2c": ["fit", "--config", "a2c/cartpole.yaml", "--data.total_timesteps=60000", "--data.eval_freq=0"],
    "dqn": ["fit", "--config", "dqn/cartpole.yaml", "--data.total_timesteps=15000", "--data.eval_freq=0"],
    "sac": ["fit", "--config", "sac/pendulum.yaml", "--data.total_timesteps=2500", "--data.eval_freq=0"],
    "grpo": [
        "fit",
        "--config",
        "grpo/addition.yaml",
        "--model.model_name_or_path=null",
        "--trainer.max_steps=30",
        "--data.eval_steps=0",
    ],
    "sft": ["fit", "--config", "sft/addition.yaml", "--trainer.max_steps=60", "--data.eval_steps=0"],
}
TIMED = """
import functools, sys, time, os, tempfile
from recipes.cli import main
os.chdir(tempfile.mkdtemp())
import lightning as L
seconds = []
class Clock(L.Callback):
    def on_train_start(self, *_): self.began = time.perf_counter()
    def on_train_end(self, *_): seconds.append(time.perf_counter() - self.began)
original = L.Trainer.__init__
@functools.wraps(original)
def init(self, *args, callbacks=None, **kwargs):
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    original(self, *args, callbacks=[*callbacks, Clock()], **kwargs)
L.Trainer.__init__ = init
words, sys.argv = sys.argv[1:], ["rl"]
try:
    main(words)
except SystemExit: pass
print("SECONDS", seconds[0])
"""


def speed(before: Path, words: list[str], pairs: int) -> bool:
    """Times the training loops of both checkouts in turn; prints the median ratio of each case.

    Returns:
        Whether every case has at least .98 of the earlier speed.
    """
    here, fast = Path(__file__).parents[1], True
    for name, command in SPEED.items():
        if words and name not in words:
            continue
        ratios = []
        for pair in range(pairs):
            seconds = {}
            for place in (before, here) if pair % 2 == 0 else (here, before):
                env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
                done = subprocess.run([sys.executable, "-c", TIMED, *command, "--trainer.accelerator=cpu"], env=env,
                                      cwd=place, capture_output=True, text=True)  # fmt: skip
                times = re.findall(r"SECONDS ([\d.]+)", done.stdout)
                if not times:
                    raise SystemExit(f"{name} did not train in {place}: {done.stderr[-500:]}")
                seconds[place] = float(times[0])
            ratios.append(seconds[before] / seconds[here])
        middle = statistics.median(ratios)
        fast &= middle >= 0.98
        print(f"{name:6} speed ÷ before: {middle:.3f}   of {', '.join(f'{r:.3f}' for r in sorted(ratios))}", flush=True)
    return fast


def main() -> None:
    """Writes or compares; exit code 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__.split("\n\n")[0])
    parser.add_argument("do", choices=["write", "compare", "speed"])
    parser.add_argument(
        "what", nargs="*", help=f"parts ({', '.join(PARTS)}) and words of names; speed: a checkout first"
    )
    parser.add_argument("--pairs", type=int, default=5, help="speed: per case")
    options = parser.parse_args()
    if options.do == "speed":
        if not options.what or not Path(options.what[0], "rl_modules").is_dir():
            parser.error("speed needs the folder of another checkout")
        raise SystemExit(not speed(Path(options.what[0]).resolve(), options.what[1:], options.pairs))
    parts = [part for part in PARTS if part in options.what or not {*options.what} & {*PARTS}]
    words = [word for word in options.what if word not in PARTS]
    found = []
    FOLDER.mkdir(exist_ok=True)
    for part in parts:
        file, now = FOLDER / f"{part}.json", PARTS[part](words)
        if options.do == "compare":
            found += differences(part, json.loads(file.read_text("utf-8")), now, only=bool(words))
        elif words and file.exists():
            golden = json.loads(file.read_text("utf-8"))
            (golden["runs"] if part == "runs" else golden).update(now["runs"] if part == "runs" else now)
            file.write_text(text_of(golden), "utf-8")
        else:
            file.write_text(text_of(now), "utf-8")
    for difference in found:
        print(difference[:2000])
    if options.do == "compare":
        print(f"{len(found)} differences in {', '.join(parts)}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
