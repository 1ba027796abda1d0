"""What each attention layer of a whole model sees, compared with what its configuration promises."""

from regard.check.model.runner import Finding, check_model

__all__ = ["Finding", "check_model"]
