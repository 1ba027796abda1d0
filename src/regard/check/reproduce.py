"""Write a failure as a self-contained program."""

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
    """A Python program that fails with the same error: target, property and smallest failing input."""
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
    """Remove the docstring from the source of a function."""
    return re.sub(r'\n    """.*?"""\n', "\n", text, count=1, flags=re.DOTALL)


def _source(function: object) -> str:
    """The source of a function without its decorator."""
    text = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    return text[re.search(r"^def ", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
