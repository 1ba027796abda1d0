"""Mixtures of experts whose tensors are stored per expert, in some of the layers."""

from __future__ import annotations

from regard.models.checkpoints.tensor_names import Rule, table
from regard.models.config_fields import cycle
from regard.models.language import LanguageConfig


def expert_rules(config: LanguageConfig, *, shared: str, shared_gate: str = "") -> tuple[Rule, ...]:
    """Return the rules of all layers with experts. shared: name of the feed-forward layer of all tokens."""
    if not config.experts:
        return ()
    dense = cycle(config.dense_layers or (False,), config.layers)
    up = ",".join(f"{n}.{name}_proj.weight" for n in range(config.experts) for name in ("gate", "up"))
    down = ",".join(f"{n}.down_proj.weight" for n in range(config.experts))
    rules: tuple[Rule, ...] = ()
    for n in (n for n in range(config.layers) if not dense[n]):
        rules += table(
            f"""
            up             experts.{{{up}}}^stack
            output         experts.{{{down}}}^stack
            router         gate
            correction     gate.e_score_correction_bias
            shared.up      {shared}.{{gate_proj,up_proj}}
            shared.output  {shared}.down_proj
            {f"shared_gate  {shared_gate}" if shared_gate else ""}
            """,
            ours=f"stack.layers.{n}.feedforward.",
            theirs=f"model.layers.{n}.mlp.",
        )
    return rules
