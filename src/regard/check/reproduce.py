"""A failure as a program that stands alone."""

from __future__ import annotations

import inspect
import re
import textwrap

from regard.check.case import Case
from regard.check.oracle import HELPERS
from regard.check.property import Property
from regard.check.targets.target import Target

IMPORTS = {
    "functools.": "import functools",
    "forward_ad.": "from torch.autograd import forward_ad",
    "math.": "import math",
    "os.": "import os",
    "ThreadPoolExecutor(": "from concurrent.futures import ThreadPoolExecutor",
    "torch.": "import torch",
    "F.": "import torch.nn.functional as F",
}


def script(target: Target, prop: Property, case: Case, reason: str) -> str:
    """Python that ends in the same error: the target, what is demanded of it, and the smallest input found."""
    body = _source(prop.body)
    helpers = [_without_docstring(_source(helper)) for helper in HELPERS if re.search(rf"\b{helper.__name__}\b", body)]
    values = {"alignment": repr(target.alignment), "growth": repr(target.growth)}
    call = ", ".join(values.get(name, name) for name in prop.parameters)
    parts = [
        target.setup_code(),
        *helpers,
        body,
        "\n".join([*case.lines("mask" in prop.parameters), f"{prop.body.__name__}({call})  # {reason}"]),
    ]
    text = "\n\n\n".join(part.strip() for part in parts)
    needed = [line for name, line in IMPORTS.items() if re.search(rf"(?<![\w.]){re.escape(name)}", text)]
    return "\n".join(["from __future__ import annotations", "", *needed, "", text]) + "\n"


def _without_docstring(text: str) -> str:
    """Without the docstring, which says nothing that its reader needs here."""
    return re.sub(r'\n    """.*?"""\n', "\n", text, count=1, flags=re.DOTALL)


def _source(function: object) -> str:
    """A function as it is written, without its decorator."""
    text = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    return text[re.search(r"^def ", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
