"""The part of Skerry that lives in an island: it counts, sends and adopts beside a training loop it never holds up."""
