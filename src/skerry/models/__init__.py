"""The models that `skerry train` trains. Any other torch module can be trained through `skerry.join`."""

from skerry.models.gpt import GPT, SIZES, GPTShape, build_gpt, generate, shape_for

__all__ = ["GPT", "SIZES", "GPTShape", "build_gpt", "generate", "shape_for"]
