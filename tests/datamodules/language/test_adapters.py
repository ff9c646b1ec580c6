"""Adapters with the real packages; a test is skipped where its package is not installed."""

import ast
import asyncio
import functools
import json
import signal
import socket
import sys
import threading
import time
import types

import gymnasium as gym
import pytest
from gymnasium import spaces

from datamodules.language.adapters.gymnasium import GymnasiumEnvironment
from datamodules.language.adapters.nemo_gym import NeMoGymEnvironment
from datamodules.language.adapters.openenv import OpenEnvEnvironment
from datamodules.language.adapters.trl import TRLEnvironment
from datamodules.language.adapters.verifiers import VerifiersEnvironment, load
from datamodules.language.environment_calls import EnvironmentCalls, wait
from datamodules.language.environments import RunSeed, load_environment
from rl_modules.common.errors import UsageError


def said(text, *calls):
    calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize(("adapter", "kwargs"), [
    (GymnasiumEnvironment, {"env_id": "FrozenLake-v1"}), (NeMoGymEnvironment, {"base_url": "http://localhost:1"}),
    (OpenEnvEnvironment, {"base_url": "http://localhost:1"}), (TRLEnvironment, {"factory": "x:y"}),
    (VerifiersEnvironment, {"env_id": "x"}),
])  # fmt: skip
def test_an_adapter_is_an_environment_of_at_most_sixty_lines(adapter, kwargs):
    path = f"{adapter.__module__}:{adapter.__name__}"
    assert load_environment(path, kwargs) is adapter
    with open(sys.modules[adapter.__module__].__file__) as file:
        source = file.read()
    tree = ast.parse(source)
    documentation = {line for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef
                     | ast.AsyncFunctionDef) and ast.get_docstring(node)
                     for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}  # fmt: skip
    lines = [n for n, line in enumerate(source.splitlines(), 1) if line.strip() and n not in documentation]
    assert len(lines) <= 60


# ---------------------------------------------------------------- TRL


class Counter:
    """A class as TRL's documentation of ``environment_factory`` has them."""

    def __init__(self, step: int = 1):
        self.step_size, self.count = step, 0

    def reset(self, target=None, **kwargs) -> str | None:
        self.count, self.target = 0, target
        return f" Start at {self.count}."

    def increment(self, times: int) -> str:
        """Adds to the counter.

        Args:
            times: How often.

        Returns:
            The counter.
        """
        self.count += times * self.step_size
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _hidden(self) -> str:
        """Hidden."""
        return ""


def test_a_class_for_trl_s_environment_factory_runs_as_it_is():
    environment = TRLEnvironment(f"{__name__}:Counter", {"step": 2})
    assert [tool["function"]["name"] for tool in environment.tools] == ["increment"]
    opening = environment.reset({"prompt": "Count to 6.", "target": 6, "seed": 1, "start_seed": 2})
    assert opening == [{"role": "user", "content": "Count to 6. Start at 0."}]
    assert environment.step(said("", ("increment", {"times": 3}))) == (
        [{"role": "tool", "name": "increment", "content": "6"}], 0.0, False)  # fmt: skip
    assert "error" in environment.step(said("", ("increment", {"times": "3"})))[0][0]["content"]
    assert environment.step(said("Done.")) == ([], 1.0, True)
    environment.reset({"prompt": [{"role": "user", "content": "x"}], "target": 6})
    assert environment.step(said("Done.")) == ([], 0.0, True)


class Client:
    """A class of TRL's kind whose client belongs to the event loop in which it was opened."""

    async def reset(self, seed=None, **kwargs) -> str:
        self.seed, self.loop, self.lock = seed, asyncio.get_running_loop(), asyncio.Lock()
        return "!"

    async def ask(self, word: str) -> str:
        """Asks.

        Args:
            word: What.
        """
        async with self.lock:
            assert self.loop is asyncio.get_running_loop()
            return word.upper()

    async def get_reward(self) -> float:
        assert self.loop is asyncio.get_running_loop()
        return 0.5


def test_an_async_class_of_trl_keeps_its_client_and_a_run_has_one_loop():
    """Nine dialogues in the threads of a run; the column ``seed`` is the record's own."""
    calls = EnvironmentCalls(functools.partial(TRLEnvironment, Client), 0, 10.0)
    prompt = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]

    def ask(method, argument):
        answers = [calls.start(number, method, argument) for number in range(9)]
        wait(answers, None, for_all=True)
        return [answer.value() for answer in answers]

    ask("reset", {"prompt": prompt, "seed": 3, "start_seed": RunSeed(5), "prompt_ids": [1]})
    instances = [environment.instance for environment in calls._holders[0]._made.values()]
    assert {instance.seed for instance in instances} == {3} and len({instance.loop for instance in instances}) == 1
    for word in ("a", "b"):
        for messages, _, _ in ask("step", said("", ("ask", {"word": word}))):
            assert messages == [{"role": "tool", "name": "ask", "content": word.upper()}]
    assert ask("step", said("done")) == [([], 0.5, True)] * 9
    calls.stop()
    deadline = time.monotonic() + 5
    while not instances[0].loop.is_closed():
        assert time.monotonic() < deadline


@pytest.mark.long
def test_tools_are_those_that_trl_finds(tmp_path):
    """GRPOTrainer's own list of an environment's tools."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rl_modules.language.tokenizer import character_tokenizer

    tokenizer = character_tokenizer()
    folder = pytest.importorskip("trl.chat_template_utils")._CHAT_TEMPLATES_DIR
    tokenizer.chat_template = (folder / "qwen3.jinja").read_text("utf-8")
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **shape))
    how = trl.GRPOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False,
                         report_to=[])  # fmt: skip
    asked = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * 2)
    trainer = trl.GRPOTrainer(model, args=how, train_dataset=asked, processing_class=tokenizer,
                              environment_factory=Counter)  # fmt: skip
    assert [tool.__name__ for tool in trainer.tools] == [t["function"]["name"] for t in TRLEnvironment(Counter).tools]


# ---------------------------------------------------------------- Gymnasium


class Echo(gym.Env):
    """Repeats what it is told, until it is told to stop."""

    observation_space = spaces.Text(20)
    action_space = spaces.Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"hello {self.np_random.integers(100)}", {}

    def step(self, action):
        return action, float(len(action)), action == "stop", False, {}


gym.register("TextEcho-v0", Echo)


def test_a_gymnasium_environment_of_texts():
    environment = GymnasiumEnvironment("TextEcho-v0")
    first = environment.reset({"start_seed": 3})
    assert first == environment.reset({"start_seed": 3}) and first[0]["content"].startswith("hello ")
    assert environment.step(said("abc")) == ([{"role": "user", "content": "abc"}], 3.0, False)
    assert environment.step(said("x" * 21))[1:] == (0.0, False)
    assert environment.step(said("stop"))[2] is True
    environment.close()


def test_a_gymnasium_environment_of_numbers_is_played_by_names():
    environment = GymnasiumEnvironment("FrozenLake-v1", {"is_slippery": False}, ["left", "down", "right", "up"])
    assert environment.reset({"start_seed": 3}) == [{"role": "user", "content": "0"}]
    assert "left, down, right, up" in environment.step(said("north"))[0][0]["content"]
    walk = ["down", "down", "right", "right", "down", "right"]
    rewards, ends = zip(*[environment.step(said(move))[1:] for move in walk], strict=True)
    assert rewards == (0, 0, 0, 0, 0, 1) and ends == (False,) * 5 + (True,)
    with pytest.raises(UsageError, match="names 2 actions"):
        GymnasiumEnvironment("FrozenLake-v1", actions=["left", "right"])
    with pytest.raises(UsageError, match="action space"):
        GymnasiumEnvironment("Pendulum-v1")


# ---------------------------------------------------------------- servers


def serve(app):
    """Serves an app of FastAPI in a thread; returns its port and how to stop it."""
    uvicorn = pytest.importorskip("uvicorn")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    return port, server


@pytest.mark.long
def test_a_server_of_openenv():
    pytest.importorskip("openenv.core")
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Word(Action):
        message: str

    class Said(Observation):
        echoed_message: str

    class EchoServer(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, word="hi", **kwargs):
            return Said(echoed_message=f"{word} {seed}")

        def step(self, action, timeout_s=None, **kwargs):
            return Said(echoed_message=action.message, reward=float(len(action.message)), done=action.message == "stop")

        @property
        def state(self):
            return State()

    port, server = serve(create_fastapi_app(EchoServer, Word, Said, max_concurrent_envs=4))
    try:
        how = {"base_url": f"http://127.0.0.1:{port}", "observation": "echoed_message", "columns": ("word",)}
        one, other = OpenEnvEnvironment(**how), OpenEnvEnvironment(**how)
        assert one.reset({"start_seed": 3, "word": "hello"}) == [{"role": "user", "content": "hello 3"}]
        assert other.reset({"start_seed": 4, "word": "hello"}) == [{"role": "user", "content": "hello 4"}]
        assert one.step(said("abc")) == ([{"role": "user", "content": "abc"}], 3.0, False)
        assert one.step(said("stop"))[1:] == (4.0, True)
        one.close()
        other.close()
        wrong = OpenEnvEnvironment(f"http://127.0.0.1:{port}")
        with pytest.raises(UsageError, match="echoed_message"):
            wrong.reset({})
        wrong.close()
    finally:
        server.should_exit = True


@pytest.mark.long
def test_a_resources_server_of_nemo_gym():
    """The package's own example, with its own records."""
    pytest.importorskip("nemo_gym")
    app = pytest.importorskip("resources_servers.example_single_tool_call.app")
    from pathlib import Path
    from unittest.mock import MagicMock

    from nemo_gym.server_utils import ServerClient

    config = app.SimpleWeatherResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="", name="weather")
    made = app.SimpleWeatherResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    port, server = serve(made.setup_webserver())
    record = json.loads(Path(app.__file__).with_name("data").joinpath("example.jsonl").read_text().splitlines()[0])
    try:
        environment = NeMoGymEnvironment(f"http://127.0.0.1:{port}")
        opening = environment.reset({**record, "prompt_ids": [1], "seed": 1, "start_seed": 1})
        assert [m["role"] for m in opening] == ["system", "user"]
        assert [tool["function"]["name"] for tool in environment.tools] == ["get_weather"]
        [answer], reward, done = environment.step(said("", ("get_weather", {"city": "Bern"})))
        assert "The weather in Bern is cold." in answer["content"] and (reward, done) == (0.0, False)
        assert "error" in environment.step(said("", ("get_weather", {"town": "Bern"})))[0][0]["content"]
        assert "no tool" in environment.step(said("", ("verify", {})))[0][0]["content"]
        assert environment.step(said("It is cold.")) == ([], 1.0, True)
        environment.reset(record)
        assert environment.step(said("It is warm.")) == ([], 0.0, True)
    finally:
        server.should_exit = True


# ---------------------------------------------------------------- verifiers


@pytest.fixture
def verifiers(monkeypatch):
    found = pytest.importorskip("verifiers")
    if not hasattr(found, "MultiTurnEnv"):
        pytest.skip("verifiers 0.2 and later have no environments of this kind")
    from datasets import Dataset

    class Countdown(found.MultiTurnEnv):
        async def setup_state(self, state):
            state["left"] = int(state["answer"])

        async def env_response(self, messages, state, **kwargs):
            state["left"] -= len(messages[-1].content)
            if state["left"] <= 0:
                state["final_env_response"] = [{"role": "user", "content": "over"}]
            return [{"role": "user", "content": f"{state['left']} left"}]

    def exactly(state):
        return 1.0 if state["left"] == 0 else 0.25

    def double(x: int) -> int:
        """Doubles.

        Args:
            x: A number.
        """
        return 2 * x

    def load_environment(kind="turns"):
        rows = Dataset.from_list([{"question": "Begin.", "answer": "5"}])
        if kind == "tools":
            rubric = found.Rubric(funcs=[lambda completion, answer: float(completion[-1].content == "10")])
            return found.ToolEnv(tools=[double], dataset=rows, rubric=rubric)
        return Countdown(dataset=rows, rubric=found.Rubric(funcs=[exactly]), system_prompt="Play.", max_turns=4)

    module = types.ModuleType("countdown_environment")
    module.load_environment = load_environment
    monkeypatch.setitem(sys.modules, "countdown_environment", module)
    load.cache_clear()


@pytest.mark.long
def test_an_environment_of_verifiers_runs_its_own_rollout(verifiers):
    [record] = load("countdown_environment").get_dataset()
    environment = VerifiersEnvironment("countdown_environment")
    opening = environment.reset({**record, "seed": 1, "start_seed": 1})
    assert [(m["role"], m["content"]) for m in opening] == [("system", "Play."), ("user", "Begin.")]
    assert environment.step(said("abc")) == ([{"role": "user", "content": "2 left"}], 0.0, False)
    assert environment.step(said("de")) == ([], 1.0, True)
    environment.close()
    other = VerifiersEnvironment("countdown_environment")
    other.reset(record)
    assert other.step(said("abcdefgh")) == ([], 0.25, True)
    other.close()


@pytest.mark.long
def test_dialogues_of_verifiers_share_an_environment_a_loop_and_no_signal(verifiers):
    """Nine at once, in the threads of a run, whose signals stay its own."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    calls = EnvironmentCalls(functools.partial(VerifiersEnvironment, "countdown_environment"), 0, 60.0)
    [record] = load("countdown_environment").get_dataset()

    def ask(method, argument):
        answers = [calls.start(number, method, argument) for number in range(9)]
        wait(answers, None, for_all=True)
        return [answer.value() for answer in answers]

    ask("reset", dict(record))
    assert len({id(environment.env) for environment in calls._holders[0]._made.values()}) == 1
    assert ask("step", said("abc")) == [([{"role": "user", "content": "2 left"}], 0.0, False)] * 9
    assert ask("step", said("de")) == [([], 1.0, True)] * 9
    calls.stop()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.long
def test_tools_of_verifiers(verifiers):
    environment = VerifiersEnvironment("countdown_environment", {"kind": "tools"})
    environment.reset(environment.env.get_dataset()[0])
    assert environment.tools[0]["function"]["name"] == "double"
    [answer], _, done = environment.step(said("", ("double", {"x": 5})))
    assert (answer["role"], answer["content"], done) == ("tool", "10", False)
    assert environment.step(said("10")) == ([], 1.0, True)
    environment.close()


@pytest.mark.parametrize("name", ["openenv", "verifiers"])
def test_a_package_that_is_not_installed_is_one_sentence(name, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"pip install 'lightning-rl-recipes\[{name}\]'"):
        OpenEnvEnvironment("http://localhost:1") if name == "openenv" else VerifiersEnvironment("never_loaded")
