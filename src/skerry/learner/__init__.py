"""The learner: counts steps, sends contributions and adopts merged versions beside an island's training loop."""
