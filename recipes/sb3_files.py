"""Reads what Stable-Baselines3 saved, archives of models and statistics of VecNormalize, without running their code."""

import ast
import io
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from datamodules.envs.vector import make_env
from datamodules.normalization import ObservationNormalizer
from rl_modules.common.errors import UsageError
from rl_modules.common.spaces import SPACES, space_from_dict
from rl_modules.core.state import pack


def refuse(path: Path, why: str) -> NoReturn:
    """Ends with the reason why a file can't be imported."""
    raise UsageError(f"{str(path)!r} can't be imported: {why}")


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the settings and the weights of an archive, with a learnt temperature among them."""
    try:
        with zipfile.ZipFile(path) as archive:
            settings = json.loads(archive.read("data"))
            policy, others = (
                torch.load(io.BytesIO(archive.read(name)), map_location="cpu", weights_only=True)
                for name in ("policy.pth", "pytorch_variables.pth")
            )
            return settings, {**policy, **(others or {})}
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        refuse(path, f"it is no file that Stable-Baselines3's model.save wrote ({str(error).splitlines()[0]})")


# ---------------------------------------------------------------- spaces


def read_spaces(path: Path, settings: dict[str, Any], env: str | None) -> dict[str, spaces.Space]:
    """Returns the spaces of an environment, or without one those that an archive describes."""
    if env is not None:
        made = make_env(env)
        made.close()
        return {name: getattr(made, name) for name in SPACES}
    try:
        return {name: space_from_dict(_described(settings[name])) for name in SPACES}
    except (KeyError, ValueError, SyntaxError, TypeError, IndexError, AttributeError):
        refuse(path, "its spaces are not readable without running its pickles; give the environment, as in --env ID")


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain description of a space from the texts that SB3 writes beside its pickle."""
    kind = re.findall(r"\w+", entry[":type:"])[-1]
    if kind == "Dict":
        tree = ast.parse(re.sub("^OrderedDict", "dict", entry["spaces"]), mode="eval").body
        if not isinstance(tree, ast.Dict):
            raise ValueError("not a dictionary")
        parts = {ast.literal_eval(key): _called(part) for key, part in zip(tree.keys, tree.values, strict=True) if key}
        return {"type": kind, "spaces": parts}
    if kind == "Box":
        shape = json.loads(entry["_shape"]) if isinstance(entry["_shape"], str) else entry["_shape"]
        bounds = {name: _numbers(entry[name], shape) for name in ("low", "high")}
        return {"type": kind, **bounds, "shape": shape, "dtype": entry["dtype"]}
    names = {"Discrete": ("n", "start"), "MultiDiscrete": ("nvec", "start"), "MultiBinary": ("n",)}[kind]
    return {"type": kind, **{name: _numbers(str(entry[name])) for name in names}}


def _numbers(text: str, shape: Any = None) -> Any:
    """Returns the numbers in NumPy's text of an array, or one where all agree; an abridged text must agree."""
    found = [float(word) for word in re.findall(r"[^\s\[\],()]+", text) if word != "..."]
    if shape is None:
        whole = [int(x) for x in found]
        return whole if "[" in text or "(" in text else whole[0]
    if len(set(found)) == 1:
        return found[0]
    return np.array(found).reshape(shape).tolist()


def _called(node: ast.expr) -> dict[str, Any]:
    """Returns the description of a space that is written as a call, such as ``Box(-1.0, 1.0, (3,), float32)``."""
    if not isinstance(node, ast.Call):
        raise ValueError("not a space")
    kind, words = ast.unparse(node.func), [ast.unparse(part) for part in node.args]
    start = {part.arg: _numbers(ast.unparse(part.value)) for part in node.keywords if part.arg}
    if kind == "Box":
        shape = list(ast.literal_eval(node.args[2]))
        low, high = (_numbers(word, shape) for word in words[:2])
        return {"type": kind, "low": low, "high": high, "shape": shape, "dtype": words[3]}
    name = {"Discrete": "n", "MultiDiscrete": "nvec", "MultiBinary": "n"}[kind]
    return {"type": kind, name: _numbers(words[0]), **start}


# ---------------------------------------------------------------- statistics of observations


class _Inert:
    """Stands for every object of a pickle that is no array; keeps its state and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...


class _Arrays(pickle.Unpickler):
    """Rebuilds NumPy's arrays; every other class or function of the pickle becomes an inert object."""

    def find_class(self, module: str, name: str) -> Any:
        kinds = {"_reconstruct": np.zeros(1).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        kinds["scalar"] = np.float64(0).__reduce__()[0]
        return kinds.get(name, _Inert) if module.partition(".")[0] == "numpy" else _Inert


def read_statistics(path: Path, space: spaces.Space) -> ObservationNormalizer | None:
    """Returns the mean and variance of observations that ``VecNormalize.save`` wrote, None under ``norm_obs=False``."""
    try:
        with path.open("rb") as file:
            saved = vars(_Arrays(file).load())
        if not saved["norm_obs"]:
            return None
        normalizer = ObservationNormalizer(space, float(saved["clip_obs"]))
        running, found = normalizer.running, saved["obs_rms"]
        pairs = [(running[key], found[key]) for key in found] if isinstance(found, dict) else [(running, found)]
        for part, its in pairs:
            if part is None or part.shape != its.mean.shape or saved["epsilon"] != 1e-8:
                raise ValueError("statistics of images or of another shape, or an epsilon other than 1e-8")
            part.take(pack({"mean": its.mean, "var": its.var, "count": float(its.count)}))
        if isinstance(running, dict):  # parts that are not among norm_obs_keys
            running.update({key: None for key in running if key not in found})
    except Exception as error:  # a foreign pickle raises errors of any kind
        refuse(path, f"it holds no statistics of VecNormalize for {space} ({error})")
    return normalizer
