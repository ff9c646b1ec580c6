"""The text that ``rl --help`` prints."""

HELP = """\
usage: rl <command> [options]

Reinforcement learning on PyTorch Lightning.

commands:
  fit        train:                 rl fit --config ppo/cartpole.yaml
  validate   evaluate a checkpoint: rl validate --config ppo/cartpole.yaml --ckpt_path PATH
  test       evaluate on other seeds and more episodes
  predict    play episodes to a file: rl predict --config … --ckpt_path PATH --output episodes.csv
             (a language model's completions of held-out prompts: --output completions.jsonl)
  record     film whole episodes:   rl record --config … --ckpt_path PATH --output videos --episodes 3
  sweep      search settings with Optuna: rl sweep sweeps/trpo/lunarlander.yaml --n_trials 50
  export     write a language model as a Hugging Face directory: rl export --ckpt_path PATH --output FOLDER
  replay     rebuild one update of a run: rl replay logs/PPO-CartPole-v1/version_0 --step 100
  verify     recompute a run from a checkpoint to the next and compare: rl verify logs/PPO-CartPole-v1/version_0
  serve      write completions for runs with --model.sampler vllm_server: rl serve --engine vllm --port 8000
  list       list the installed configs with their one-line descriptions: rl list, rl list cartpole
  copy       copy a config to edit: rl copy ppo/cartpole.yaml mine.yaml
  doctor     versions, device, and how to install what is missing
  completion bash|zsh: completion for the shell: eval "$(rl completion bash)"

options of fit, validate, test, predict and record:
  --config NAME            a YAML file, or the name of an installed config; repeated, later files override earlier ones
  --model CLASS            an algorithm by name (PPO) or import path (my_package.MyPPO)
  --data CLASS             a datamodule by name (RolloutDataModule) or import path
  --model.X, --data.X, --trainer.X
                           any argument of the model, the datamodule or Lightning's Trainer
  --model.init_from PATH   fit: start a new run from the weights of a checkpoint (warm start)
  --resume                 fit: resume the newest run of this model on this data, in its folder
  --ckpt_path PATH|last|best|previous
                           a checkpoint, or one of the newest run's
  --seed_everything N      seed of environments, actions, minibatches and weights, and of the global generators
  --print_config           print the complete resolved config and stop
  --help                   with --config or --model: the arguments of these classes; --help all: every option
  --version                print the version: rl --version

Every algorithm also has a short program in Python, which starts with its default config if it gets a command:
python -m recipes.ppo, python -m recipes.ppo fit
"""
