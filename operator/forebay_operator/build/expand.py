"""$(VAR) in container commands, args and env values, as Kubernetes expands it."""

from __future__ import annotations

from collections.abc import Mapping


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes its value, or stays as it is when unknown; `$$` becomes `$` and so shields what follows.

    The rules are those of k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    out: list[str] = []
    at = 0
    while at < len(text):
        dollar = text.find("$", at)
        if dollar < 0 or dollar == len(text) - 1:
            out.append(text[at:])
            break
        out.append(text[at:dollar])
        following = text[dollar + 1]
        if following == "$":
            out.append("$")
            at = dollar + 2
        elif following == "(" and (end := text.find(")", dollar + 2)) >= 0:
            name = text[dollar + 2 : end]
            out.append(variables.get(name, text[dollar : end + 1]))
            at = end + 1
        else:
            out.append("$" + following)
            at = dollar + 2
    return "".join(out)
