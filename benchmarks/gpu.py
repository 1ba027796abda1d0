"""Check and time attention on a GPU, and write one report: `python -m benchmarks.gpu --device cuda`.

Correctness comes first: the properties of `regard check`, then every case at a short length against the reference in
float64. A case that is wrong has no time. Then ratios to other libraries, measured in turns in one process, and the
share of the peak of matrix products. `--device cpu --quick` runs all of it in a minute, to test this program.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from benchmarks.timing import time_interleaved
from regard.check import PROPERTIES, check
from regard.check.targets.devices import available_device, on_device
from regard.check.targets.engines import engine
from regard.engines.cost import TILE, forward_flops, visited_entries

SHORT = 192  # tokens of the comparison with the reference
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Case:
    """A description by number of heads and length, with what it means to FlashAttention, if that can compute it."""

    name: str
    describe: Callable[[int, int], dict[str, Any]]
    flash: dict[str, Any] | None = None
    queries: int | None = None
    kv_share: int = 1


CASES = (
    Case("plain", lambda heads, length: {}, {}),
    Case("causal", lambda heads, length: {"mask": rg.causal()}, {"causal": True}),
    Case("causal, grouped heads", lambda heads, length: {"mask": rg.causal()}, {"causal": True}, kv_share=4),
    Case("window", lambda heads, length: {"mask": rg.window(255, 0)}, {"causal": True, "window_size": (255, 0)}),
    Case("documents", lambda heads, length: {"mask": rg.documents(torch.arange(length) // 300) & rg.causal()}),
    Case("window and alibi", lambda heads, length: {"mask": rg.window(255, 0), "bias": rg.alibi(heads)}),
    Case("dropout", lambda heads, length: {"mask": rg.causal(), "dropout": 0.1}),
    Case(
        "softcap", lambda heads, length: {"mask": rg.causal(), "score": rg.Dot(softcap=30.0)},
        {"causal": True, "softcap": 30.0},
    ),
    Case("decode", lambda heads, length: {}, {}, queries=1, kv_share=4),
)  # fmt: skip


@dataclass
class Result:
    case: Case
    backward: bool
    engine: str = ""
    milliseconds: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    share_of_peak: float = 0.0
    wrong: str = ""


class Bench:
    """All measurements on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quick: bool) -> None:
        self.device, self.dtype = device, dtype
        self.sizes = (1, 4, 256, 32) if quick else (4, 16, 4096, 64)
        self.budget = 0.1 if quick else 2.0

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def inputs(self, case: Case, length: int, dtype: torch.dtype) -> list[Tensor]:
        B, H, _, D = self.sizes
        generator = torch.Generator().manual_seed(0)
        queries, kv_heads = case.queries or length, H // case.kv_share
        shapes = (B, H, queries, D), (B, kv_heads, length, D), (B, kv_heads, length, D)
        return [torch.randn(shape, generator=generator).to(self.device, dtype).requires_grad_() for shape in shapes]

    def describe(self, case: Case, length: int) -> rg.Attention:
        return rg.Attention(**case.describe(self.sizes[1], length))

    def find_error(self, case: Case, backward: bool) -> str:
        """Compare a short call and its gradients with the reference in float64; return what is wrong."""
        attend, result = self.describe(case, SHORT), []
        for name in (None, "reference"):
            given = self.inputs(case, SHORT, self.dtype)
            if name == "reference":
                given = [x.detach().double().cpu().requires_grad_() for x in given]
            torch.manual_seed(1)
            output = attend.to(given[0].device)(*given, engine=name)
            gradients = torch.autograd.grad(output.square().sum(), given) if backward else ()
            result.append([output.detach(), *gradients])
        for name, ours, exact in zip(("output", "d query", "d key", "d value"), *result, strict=False):
            error = float((ours.double().cpu() - exact).abs().max() / exact.abs().max())
            if not error <= TOLERANCE[self.dtype]:
                return f"{name} is off by {error:.2g} of the largest"
        return ""

    def measure(self, case: Case, backward: bool) -> Result:
        result = Result(case, backward)
        try:
            if wrong := self.find_error(case, backward):
                result.wrong = wrong
                return result
            self._time(result)
        except Exception as error:  # the report shows it, and the run continues
            result.wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return result

    def _time(self, result: Result) -> None:
        case, length = result.case, self.sizes[2]
        given, attend = self.inputs(case, length, self.dtype), self.describe(case, length).to(self.device)
        result.engine = attend.explain(*given).engine
        calls = {"ours": self._timed(lambda: attend(*given), given, result.backward)}
        for name, build in (("SDPA", self._sdpa), ("FlexAttention", self._flex), ("FlashAttention", self._flash)):
            try:
                call = build(case, attend, given)
                self._timed(call, given, result.backward)()
            except Exception as error:  # a peer that cannot compute this has no ratio
                print(f"    no {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                continue
            calls[name] = self._timed(call, given, result.backward)
        flops = self._add_peak(calls)
        seconds = time_interleaved(calls, self.budget)
        ours, peak = seconds.pop("ours"), flops / seconds.pop("peak")
        result.milliseconds = ours * 1e3
        result.ratios = {name: time / ours for name, time in seconds.items()}
        problem = attend.problem(*given)
        entries = visited_entries(problem.mask, problem.frame, TILE)
        own = forward_flops(entries, problem.score, problem.D, problem.E) * (3.5 if result.backward else 1)
        result.share_of_peak = own / ours / peak

    def _timed(self, call: Callable[[], Tensor], given: list[Tensor], backward: bool) -> Callable[[], None]:
        if not backward:

            def forward() -> None:
                with torch.no_grad():
                    call()
                self.synchronize()

            return forward
        seed = torch.ones_like(call())

        def both() -> None:
            torch.autograd.grad(call(), given, seed)
            self.synchronize()

        return both

    def _add_peak(self, calls: dict[str, Callable[[], None]]) -> int:
        n = 512 if self.device.type == "cpu" else 8192
        a, b = (torch.randn(n, n, device=self.device).to(self.dtype) for _ in range(2))

        def product() -> None:
            a @ b
            self.synchronize()

        calls["peak"] = product
        return 2 * n**3

    def _sdpa(self, case: Case, attend: rg.Attention, given: list[Tensor]) -> Callable[[], Tensor]:
        problem = attend.problem(*given)
        if set(case.describe(1, 1)) - {"mask", "dropout"}:
            raise ValueError("no bias or softcap without a dense tensor")
        plain = case.name.startswith("causal") or case.name == "dropout"
        dense = (
            None if plain or problem.mask is None else problem.mask.allows(problem.frame.indices(device=self.device))
        )
        return lambda: F.scaled_dot_product_attention(
            *given, attn_mask=dense, is_causal=plain, dropout_p=problem.dropout, enable_gqa=case.kv_share > 1
        )

    def _flex(self, case: Case, attend: rg.Attention, given: list[Tensor]) -> Callable[[], Tensor]:
        if self.device.type == "cpu":
            raise ValueError("compiling for a CPU takes minutes")
        return lambda: attend(*given, engine="flex")

    def _flash(self, case: Case, attend: rg.Attention, given: list[Tensor]) -> Callable[[], Tensor]:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        if case.flash is None:
            raise ValueError("it has no such mask or bias")
        return lambda: flash_attn_func(*(x.transpose(1, 2) for x in given), **case.flash).transpose(1, 2)


def report(bench: Bench, results: list[Result], properties: list[str], command: str) -> str:
    B, H, N, D = bench.sizes
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else str(bench.device)
    versions = f"regard {importlib.metadata.version('regard')}, torch {torch.__version__}"
    lines = [
        f"# Attention on {name}", "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M UTC}, {versions}; {str(bench.dtype).removeprefix('torch.')}, "
        f"B={B}, H={H}, N={N:,}, D={D}.", "",
        "## Correctness", "", *properties, "",
        "## Speed", "",
        "Ratios are a peer's time divided by ours; the share is of a matrix product that takes turns with them.", "",
        "| case | pass | engine | ms | SDPA | FlexAttention | FlashAttention | of peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for each in results:
        cells = [each.case.name, "forward + backward" if each.backward else "forward"]
        if each.wrong:
            cells += [f"NO TIME: {each.wrong}", "", "", "", "", ""]
        else:
            ratios = (f"{each.ratios[peer]:.2f}x" if peer in each.ratios else "-" for peer in PEERS)
            cells += [each.engine, f"{each.milliseconds:.3f}", *ratios, f"{each.share_of_peak:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PEERS = ("SDPA", "FlexAttention", "FlashAttention")


def check_properties(device: torch.device, only: tuple[str, ...]) -> list[str]:
    """Return a line for each engine: how many properties hold on the device, and which fail."""
    lines = []
    for name in ("selected", *(() if device.type == "cpu" else ("triton",))):
        target = on_device(engine(name), device)
        outcomes = list(check([target], [PROPERTIES[each] for each in only or PROPERTIES]))
        failed = [f"{outcome.property} ({outcome.reason})" for outcome in outcomes if outcome.status == "failed"]
        passed = sum(outcome.status == "passed" for outcome in outcomes)
        lines.append(
            f"- {name}: {passed} properties hold, {len(failed)} fail{': ' if failed else ''}{'; '.join(failed)}"
        )
        print(lines[-1], flush=True)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(each).removeprefix("torch.") for each in TOLERANCE])
    parser.add_argument("--quick", action="store_true", help="short calls, and one property of the check")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name contains NAME")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"))
    given = parser.parse_args(arguments)
    device = available_device(given.device)
    bench = Bench(device, getattr(torch, given.dtype), given.quick)
    properties = check_properties(device, ("definition",) if given.quick else ())
    results = []
    for case in CASES:
        for backward in (False, True):
            if given.only in case.name and not (backward and case.queries):
                results.append(bench.measure(case, backward))
                print(f"  {case.name}: {results[-1].wrong or f'{results[-1].milliseconds:.3f} ms'}", flush=True)
    command = " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    given.out.write_text(report(bench, results, properties, command))
    print(f"wrote {given.out}")
    return 1 if any(each.wrong for each in results) or any(", 0 fail" not in line for line in properties) else 0


if __name__ == "__main__":
    sys.exit(main())
