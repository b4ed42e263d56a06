"""Models that Skerry trains out of the box; any other torch module can be trained as well."""

from skerry.models.gpt import GPT, SIZES, GPTShape, build_gpt, generate, shape_for

__all__ = ["GPT", "SIZES", "GPTShape", "build_gpt", "generate", "shape_for"]
