"""What the rows of all seeds say together."""

from __future__ import annotations

import statistics

from bench.rescale.cases import FIXED, START
from forebay_operator.replay.policies import LAWS

SETTING = ("mix", "level", "gear", "convertible", "variant")
"""Columns that the means of a summary's line go over the seeds of."""


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Mean over seeds, per setting: each law's attainment and moves, the best fixed split, and the best other law."""
    groups: dict[tuple[object, ...], dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        policies = groups.setdefault(tuple(row[name] for name in SETTING), {})
        figures = float(str(row["attainment"])), float(str(row["moves"]))
        policies.setdefault(str(row["policy"]), []).append(figures)
    result: list[dict[str, object]] = []
    for key, policies in groups.items():
        means = {policy: round(statistics.mean(a for a, _ in found), 2) for policy, found in policies.items()}
        moves = {policy: round(statistics.mean(m for _, m in found), 1) for policy, found in policies.items()}
        fixed = {policy: value for policy, value in means.items() if policy in FIXED}
        others = {policy: means[policy] for policy in means if policy in LAWS and policy != "forebay"}
        line: dict[str, object] = dict(zip(SETTING, key, strict=True))
        line["seeds"] = max(len(found) for found in policies.values())
        line["attainment"] = {policy: value for policy, value in means.items() if policy not in fixed}
        line["moves"] = {policy: value for policy, value in moves.items() if policy in LAWS}
        if fixed:
            line["best_fixed"] = max(fixed, key=lambda p: fixed[p])
            line["best_fixed_attainment"] = max(fixed.values())
            line["start_split_attainment"] = fixed.get(START)
        if others:
            line["best_other"] = max(others, key=lambda p: others[p])
            line["best_other_attainment"] = max(others.values())
        result.append(line)
    return result


def table(lines: list[dict[str, object]]) -> str:
    """The summary as docs/rescaling.md has it: attainment and, in parentheses, moves of each law."""
    head = ["mix", "gear", "convertible", *LAWS, "best fixed", "4:4", "oracle"]
    text = [" | ".join(["", *head, ""]).strip(), "|".join(["", *["---"] * len(head), ""])]
    for line in lines:
        attained, moves = line["attainment"], line["moves"]
        assert isinstance(attained, dict)
        assert isinstance(moves, dict)
        named = {"own": "alone", "heavy": ""}
        mix = " ".join(named.get(str(line[name]), str(line[name])) for name in ("mix", "level", "variant"))
        laws = [f"{attained[law]:.1f} ({moves[law]:.0f})" if law in attained else "-" for law in LAWS]
        best, start = line.get("best_fixed"), line.get("start_split_attainment")
        cells = [
            *(" ".join(mix.split()), line["gear"], line["convertible"], *laws),
            f"{line['best_fixed_attainment']:.1f} {str(best).removeprefix('fixed:')}" if best else "-",
            f"{start:.1f}" if start is not None else "-",
            f"{attained['oracle']:.1f}" if "oracle" in attained else "-",
        ]
        text.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(text)
