"""verl, without a change of its code: importing this module (its ``verl.plugins`` entry point) hooks what verl runs.

Nothing of verl is imported here: each hook is applied when verl imports the module that it belongs to.
"""

from otel_rollout.frameworks.verl.hooks import install, status

__all__ = ["install", "status"]

install()
