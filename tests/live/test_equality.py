"""Greedy text of prefill/decode = single worker = Hugging Face generate, token for token, in float32.

A differing token counts as equal only where the reference's two best logits lie within 1e-3: such ties are counted and
printed (in pytest's summary), and the comparison goes on from the reference's token.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from forebay_engine.text.tokenizer import FolderTokenizer
from support.client import complete
from support.cluster import Cluster, until

pytestmark = [pytest.mark.live, pytest.mark.model, pytest.mark.timeout(900)]

TIE = 1e-3
CHUNK = 128
"""--max-batched-tokens here, so that chunk borders are cheap to reach."""

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 143, 144, 145, 255, 256, 257, 384, 2000]
OUTPUT = 10
ARGS = ["--dtype", "float32", "--max-batched-tokens", str(CHUNK), "--max-model-len", "2304"]


class Reference:
    """Hugging Face's own model and greedy loop."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._torch = torch
        self._names = FolderTokenizer(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def name(self, token: int) -> str:
        raw = self._names.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[tuple[int, int, float]]]:
        """Token ids, and (best, second, gap) of the logits at each position."""
        with self._torch.inference_mode():
            out = self.model.generate(
                self._torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=count,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tops = [logits[0].topk(2) for logits in out.logits]
        bests = [(int(t.indices[0]), int(t.indices[1]), float(t.values[0] - t.values[1])) for t in tops]
        return out.sequences[0, len(prompt) :].tolist(), bests


@dataclass
class Case:
    name: str
    prompt: list[int]
    ids: list[int]
    tops: list[tuple[int, int, float]]


@pytest.fixture(scope="module")
def reference(smollm2_dir):
    return Reference(smollm2_dir)


@pytest.fixture(scope="module")
def cases(reference) -> list[Case]:
    rng = random.Random(0)
    prompts = [(f"{n} random ids", [rng.randrange(20, 49000) for _ in range(n)]) for n in LENGTHS]
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a small village by the sea,",
        "Le chat est sur la table. Ο Σωκράτης ήταν φιλόσοφος. 東京は日本の",
        "1, 2, 3, 4, 5, 6,",
        "Ingredients:\n- 2 eggs\n- 1 cup of flour\n",
        "Water boils at",
        "The three primary colours are",
        "SELECT name FROM users WHERE",
        "Dear Sir or Madam,\n\nI am writing to",
        "<html><body><h1>",
        "The mitochondria is the",
        "Q: What is 12 times 12?\nA:",
        "😀 Emoji are",
        "import numpy as np\n\n",
        "To be, or not to be,",
        "In 1969, the first",
    ]
    prompts += [(text[:20], reference.tokenizer(text)["input_ids"]) for text in texts]
    return [Case(name, prompt, *reference.generate(prompt, OUTPUT)) for name, prompt in prompts]


async def tokens_of(session, url, prompt, count):
    """The names of the answer's tokens: log-probabilities carry one per token, and no two tokens share one."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = await complete(session, url, body)
    assert answer.status == 200, answer.error
    assert answer.usage["completion_tokens"] == count
    return answer.body["choices"][0]["logprobs"]["tokens"]


Ask = Callable[[list[int], int], Awaitable[list[str]]]
"""The names of so many tokens after a prompt."""


async def compare(
    session, url, reference, case: Case, ties: list[str], first: Ask | None = None, *, what: str = ""
) -> None:
    """`first` asks for the whole answer, where it is not the plain way; what follows a tie comes the plain way."""
    prompt, expected, tops = list(case.prompt), list(case.ids), list(case.tops)
    while expected:
        if first is not None:
            got, first = await first(prompt, len(expected)), None
        else:
            got = await tokens_of(session, url, prompt, len(expected))
        names = [reference.name(token) for token in expected]
        wrong = next((i for i, (a, b) in enumerate(zip(got, names, strict=True)) if a != b), None)
        if wrong is None:
            return
        best, second, gap = tops[wrong]
        found = f"{case.name}{what}: token {wrong} is {got[wrong]!r}, "
        found += f"the reference's {names[wrong]!r} leads by {gap:.4f}"
        assert gap < TIE, found
        assert got[wrong] in (reference.name(best), reference.name(second)), found
        ties.append(f"{case.name}: token {wrong}, gap {gap:.1e}")
        prompt += expected[: wrong + 1]
        expected, tops = expected[wrong + 1 :], tops[wrong + 1 :]


@pytest.fixture
def found(record_property) -> Callable[[str, int, list[str]], None]:
    def say(what: str, count: int, ties: list[str]) -> None:
        record_property("found", f"{what}: {count} prompts equal, {len(ties)} ties: {ties}")

    return say


async def compare_all(cluster, url, reference, cases, found, what):
    ties: list[str] = []
    for case in cases:
        await compare(cluster.session, url, reference, case, ties)
    found(what, len(cases), ties)


async def compare_at_once(cluster, url, reference, cases, found, what):
    ties: list[str] = []
    await asyncio.gather(*(compare(cluster.session, url, reference, case, ties) for case in cases))
    found(what, len(cases), ties)


async def test_one_worker_equals_hugging_face(tmp_path, smollm2_dir, reference, cases, found):
    assert len(cases) >= 40
    async with Cluster(
        tmp_path,
        decode=0,
        with_router=False,
        engine="native",
        model_dir=smollm2_dir,
        worker_args=[*ARGS, "--no-prefix-cache"],
    ) as cluster:
        await compare_all(cluster, cluster.workers["p0"].url, reference, cases, found, "single worker")
        await cluster.assert_nothing_left()


async def test_prefill_decode_equals_hugging_face(tmp_path, smollm2_dir, reference, cases, found):
    async with Cluster(tmp_path, decode=2, engine="native", model_dir=smollm2_dir, worker_args=ARGS) as cluster:
        url = cluster.router.url
        await compare_all(cluster, url, reference, cases, found, "prefill/decode")
        pulled = sum([(await cluster.load(name)).kv_bytes_received for name in ("d0", "d1")])
        assert pulled > 0, "no KV bytes moved: these answers did not come from a hand-off"
        repeats = [case for case in cases if 32 <= len(case.prompt) <= 300]
        cached = await total(cluster, "p0", "forebay_engine_prefix_cached_tokens_total")
        await compare_all(cluster, url, reference, repeats, found, "prefix-cached repeats")
        more = await total(cluster, "p0", "forebay_engine_prefix_cached_tokens_total") - cached
        assert more >= sum(len(case.prompt) // 2 for case in repeats), "they were not cached: this proves nothing"
        eight = [case for case in cases if 15 <= len(case.prompt) <= 145][:8]
        await compare_at_once(cluster, url, reference, eight, found, "8 at once")
        await cluster.assert_nothing_left()
        await kill_mid_stream(cluster, reference, next(case for case in cases if case.name.startswith("Once")), found)


async def total(cluster, name: str, metric: str) -> float:
    """A counter of one worker, of all its labels."""
    async with cluster.session.get(cluster.workers[name].url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    values = [float(line.split()[-1]) for line in lines if line.startswith(metric)]
    assert values, f"{name} exports no {metric}"
    return sum(values)


async def kill_mid_stream(cluster, reference, case: Case, found) -> None:
    case = Case(case.name, case.prompt, *reference.generate(case.prompt, 40))

    async def serving() -> str:
        loads = {name: await cluster.load(name) for name in ("d0", "d1")}
        return next((n for n, load in loads.items() if load.resident_decode_tokens > len(case.prompt) + 5), "")

    async def killed(prompt: list[int], count: int) -> list[str]:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        streamed = {**body, "stream": True, "logprobs": 0}
        running = asyncio.create_task(complete(cluster.session, cluster.router.url, streamed))
        victim = ""

        async def mid_stream() -> bool:
            nonlocal victim
            victim = await serving()
            return bool(victim)

        await until(mid_stream, "a decode worker is in mid-stream", 20, period=0.01)
        await cluster.workers[victim].kill()
        answer = await running
        assert answer.done, answer.error
        assert answer.headers["x-forebay-decode"] == victim
        other = "d1" if victim == "d0" else "d0"
        assert f": forebay decode={other}" in answer.comments, "the kill came after the answer: this proves nothing"
        return [name for chunk in answer.chunks for c in chunk["choices"] for name in c["logprobs"]["tokens"]]

    ties: list[str] = []
    await compare(cluster.session, cluster.router.url, reference, case, ties, killed, what=", after the kill")
    found("after a decode kill in mid-stream", 1, ties)


async def test_preemption_changes_no_token(tmp_path, smollm2_dir, reference, found):
    """40 blocks for 8 requests that need 7 to 8 each: some must give way and come back, on one worker and on the decode
    worker of two."""
    args = [*ARGS, "--kv-memory", str(40 * 16 * 46080), "--max-model-len", "512"]
    async with Cluster(tmp_path, engine="native", model_dir=smollm2_dir, worker_args=args) as cluster:
        rng = random.Random(5)
        prompts = [[rng.randrange(20, 49000) for _ in range(60)] for _ in range(8)]
        eight = [Case(f"preempted {i}", prompt, *reference.generate(prompt, 48)) for i, prompt in enumerate(prompts)]
        for name, url in ("p0", cluster.workers["p0"].url), ("d0", cluster.router.url):
            await compare_at_once(cluster, url, reference, eight, found, f"preemption on {name}")
            count = await total(cluster, name, "forebay_engine_preemptions_total")
            assert count > 0, f"nothing was preempted on {name}: the test proves nothing"
        assert (await cluster.load("d0")).kv_bytes_received > 0
        await cluster.assert_nothing_left()
