"""The texts that ``rl --help`` and ``rl COMMAND --help`` print."""

COMMANDS = ("fit", "validate", "test", "predict", "record")
#: Commands that start no run.
OTHERS = ("sweep", "export", "serve", "replay", "verify", "list", "copy", "doctor", "completion")

HELP = """\
usage: rl <command> [options]

Reinforcement learning on PyTorch Lightning.

commands:
  fit        train:                 rl fit --config ppo/cartpole.yaml
  validate   evaluate a checkpoint: rl validate --config ppo/cartpole.yaml --ckpt_path PATH
  test       evaluate a checkpoint on other seeds and more episodes (a language model: as validate)
  predict    play episodes to a file: rl predict --config … --ckpt_path PATH --output episodes.csv
             (a language model's completions of held-out prompts: --output completions.jsonl)
  record     film whole episodes:   rl record --config … --ckpt_path PATH --output videos --episodes 3
  sweep      search settings with Optuna: rl sweep sweeps/trpo/lunarlander.yaml --n_trials 50
  export     write a language model as a Hugging Face directory: rl export --ckpt_path PATH --output FOLDER
  replay     rebuild one update of a run: rl replay logs/PPO-CartPole-v1/version_0 --step 100
  verify     recompute the last part of a run and compare: rl verify logs/PPO-CartPole-v1/version_0
  serve      generate completions for runs with --model.sampler vllm_server: rl serve --engine vllm --port 8000
  list       list the installed configs with their one-line descriptions: rl list, rl list cartpole
  copy       copy a config to edit: rl copy ppo/cartpole.yaml mine.yaml
  doctor     print versions, the device, and the commands that install missing extras
  completion print a completion script for bash or zsh: eval "$(rl completion bash)"

options of fit, validate, test, predict and record:
  --config NAME            a YAML file, or the name of an installed config; repeated, later files override earlier ones
  --model CLASS            an algorithm by name (PPO) or import path (my_package.MyPPO)
  --data CLASS             a datamodule by name (RolloutDataModule) or import path
  --model.X, --data.X, --trainer.X
                           any argument of the model, the datamodule or Lightning's Trainer
  --model.init_from PATH   fit: start a new run from the weights of a checkpoint (warm start); a language model starts
                           from a directory that `rl export` wrote: --model.model_name_or_path FOLDER
  --resume                 fit: resume the newest run of this model on this data, in its folder
  --ckpt_path PATH|last|best|previous
                           a checkpoint file, or a checkpoint of the newest run
  --seed_everything N      seed of environments, actions, minibatches and weights, and of the global generators
  --print_config           print the complete resolved config and stop
  --help                   with --config or --model: print the arguments of these classes; --help all: every option
                         of another command: rl COMMAND --help
  --version                print the version: rl --version

Every algorithm but RecurrentA2C, DPO, KTO and RLOO also has a short Python program: python -m recipes.ppo. With a
command it is rl with a default config (dpo, kto and rloo too): python -m recipes.ppo fit --model.gamma 0.9
"""

#: Help of the commands that start no run; ``replay`` and ``verify`` have parsers of their own.
COMMAND_HELP = {
    "export": """\
usage: rl export --ckpt_path PATH --output FOLDER [--model CLASS]

Writes the language model of a checkpoint as a Hugging Face directory that from_pretrained loads.

options:
  --ckpt_path PATH   a checkpoint file, as in logs/SFT-addition/version_0/checkpoints/last.ckpt
  --output FOLDER    the directory to write
  --model CLASS      import path of the algorithm, if it is not part of rl_modules
""",
    "serve": """\
usage: rl serve [--engine vllm|native] [--host HOST] [--port PORT] [--token_file FILE]
                [--gpu_memory_utilization SHARE] [--max_rows_in_flight N]

Generates completions for runs with --model.sampler vllm_server. The run sends the model and its weights. The server
answers only runs that know its token: that of the variable RL_SERVE_TOKEN, or a new one, which it writes to a file.

options:
  --engine vllm|native            the engine that generates; default: vllm
  --host HOST                     the address to listen on; default: 127.0.0.1
  --port PORT                     the port to listen on; 0: any free port; default: 8000
  --token_file FILE               where to write the token, for this user alone to read; default:
                                  ~/.cache/lightning-rl-recipes/serve-PORT.token
  --gpu_memory_utilization SHARE  vllm: share of the GPU's memory to use; default: 0.9
  --max_rows_in_flight N          maximum number of completions decoded together; default: no limit
""",
    "sweep": """\
usage: rl sweep FILE [--n_trials N] [--model.X VALUE] [--data.X VALUE] [--trainer.X VALUE]

Searches settings with Optuna, as in rl sweep sweeps/trpo/lunarlander.yaml. FILE names a config and ranges of its
arguments; other options hold for all trials. A trial trains in one process. The same command resumes a stopped sweep,
and several at once share the trials.

options:
  --n_trials N   number of trials, also to extend a finished sweep; default: the file's, or 50
""",
    "list": """\
usage: rl list [WORD]

Lists the installed configs with their one-line descriptions; with WORD, those whose name or description contains it.
""",
    "copy": """\
usage: rl copy NAME FILE

Copies an installed config to a file, as in rl copy ppo/cartpole.yaml mine.yaml.
""",
    "doctor": """\
usage: rl doctor

Prints versions, the device, and for each missing extra the command that installs it.
""",
    "completion": """\
usage: rl completion bash|zsh

Prints a completion script: eval "$(rl completion bash)".
""",
}
