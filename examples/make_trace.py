"""Makes examples/trace.csv: ten minutes of chat whose prompts grow long in the middle.

Arrivals are a Poisson process of 0.6 requests/s; lengths are lognormal, with medians of 400 prompt tokens (4,000 from
minute 4 to 7) and 150 tokens of answer.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

SECONDS = 600.0
RATE = 0.6
LONG = (240.0, 420.0)


def main() -> None:
    draw = random.Random(0)
    lines = ["arrived_at,prompt_tokens,output_tokens"]
    at = draw.expovariate(RATE)
    while at < SECONDS:
        middle = 4000 if LONG[0] <= at < LONG[1] else 400
        prompt = min(16_000, max(8, round(draw.lognormvariate(math.log(middle), 0.6))))
        answer = min(2_000, max(1, round(draw.lognormvariate(math.log(150), 0.8))))
        lines.append(f"{at:.3f},{prompt},{answer}")
        at += draw.expovariate(RATE)
    (Path(__file__).parent / "trace.csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
