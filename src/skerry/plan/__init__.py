"""Before a run: what fits islands and links (`skerry plan`), and what a link is like (`skerry doctor`)."""
