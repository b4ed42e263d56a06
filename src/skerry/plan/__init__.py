"""Prepare a run: choose settings for islands and links (`skerry plan`), and measure a link (`skerry doctor`)."""
