"""`lmtool completion SHELL`: prints what makes a shell complete lmtool's commands, keys, choices, runs and files.

The shell asks `lmtool completion query SHELL LINE` at each TAB: silent whatever goes wrong, and without torch or Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmtool.cli.completion.candidates import SHELLS, Line, candidates, for_shell
from lmtool.config.nearest import nearest
from lmtool.errors import UserError
from lmtool.system.terminal import say, shown

_BASH = """\
# lmtool in bash: put this line into ~/.bashrc
#   source <(lmtool completion bash)
_lmtool() {
    local line="${COMP_LINE:0:${COMP_POINT:-0}}"
    [ -n "$line" ] || line="${COMP_WORDS[*]}"
    COMPREPLY=()
    local word
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(lmtool completion query bash "$line" 2>/dev/null)
}
complete -o nospace -F _lmtool lmtool
"""
_ZSH = """\
# lmtool in zsh: put this line into ~/.zshrc, after compinit
#   source <(lmtool completion zsh)
_lmtool() {
    local -a candidates
    candidates=("${(@f)$(lmtool completion query zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    [[ -n "$candidates" ]] && compadd -Q -S '' -- "${candidates[@]}"
}
compdef _lmtool lmtool
"""
_FISH = """\
# lmtool in fish: put this line into ~/.config/fish/config.fish
#   lmtool completion fish | source
complete -c lmtool -f -a '(lmtool completion query fish (commandline -cp | string collect) 2>/dev/null)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(words: Sequence[str]) -> int:
    """words: the shell. UserError where it is none of them."""
    if words and words[0] == "query":
        _answer(words[1:])
        return 0
    if len(words) != 1 or words[0] not in SCRIPTS:
        close = nearest(words[0], SHELLS) if words else None
        raise UserError(
            f"{' '.join(['completion', *words])}: give one of {', '.join(SHELLS)}",
            f"lmtool completion {close or 'bash'}; its first lines say where it goes",
        )
    say(SCRIPTS[words[0]].removesuffix("\n"))
    return 0


def _answer(words: Sequence[str]) -> None:
    """Print the candidates, a line each. A TAB is no place for an error, whatever it is."""
    try:
        shell, text = words
        for word in for_shell(candidates(text), Line.of(text).current, shell):
            if shown(word) == word:  # a path with a secret in it is typed by hand
                say(word)
    except Exception:
        return
