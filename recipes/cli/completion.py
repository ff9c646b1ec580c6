"""``rl completion bash``: shell completion of commands, configs and common options."""

from recipes.cli.help_text import COMMANDS, OTHERS
from recipes.cli.options import COMMON
from rl_modules.common.errors import UsageError

SHELLS = ("bash", "zsh")

_BASH = """\
_rl() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  elif [ "$before" = --config ] || [ "$before" = -c ] || [ "${{COMP_WORDS[1]}}" = copy ]; then
    COMPREPLY=($(compgen -W "$(rl list 2>/dev/null | cut -d' ' -f1)" -- "$word") $(compgen -f -- "$word"))
  elif [ "$before" = --model ]; then
    COMPREPLY=($(compgen -W "{models}" -- "$word"))
  elif [ "$before" = --data ]; then
    COMPREPLY=($(compgen -W "{datamodules}" -- "$word"))
  elif [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o default -F _rl rl
"""


def script(words: list[str]) -> str:
    """Returns the completion script of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f"completion takes the name of a shell, bash or zsh, as in `eval \"$(rl completion bash)\"`; "
                         f"got {' '.join(map(repr, words)) or 'none'}")  # fmt: skip
    import datamodules
    import rl_modules

    text = _BASH.format(
        commands=" ".join([*COMMANDS, *OTHERS]),
        models=" ".join(rl_modules.__all__),
        datamodules=" ".join(name for name in datamodules.__all__ if name.endswith("DataModule")),
        options=" ".join(COMMON),
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if words[0] == "zsh" else text
