"""``${{ expr }}``: typed, sandboxed by having nothing to escape to, bounded in length, depth and size.

The language has no loops, no attributes but map entries, no calls but the functions listed, and every operation that
could grow its result checks the size first. Evaluating never hangs and raises nothing but ExpressionError.
"""

from areal.resources.expressions.evaluate import Environment, Scope, evaluate
from areal.resources.expressions.syntax import ExpressionError
from areal.resources.expressions.template import Template, parse_template

__all__ = ["Environment", "ExpressionError", "Scope", "Template", "evaluate", "parse_template"]
