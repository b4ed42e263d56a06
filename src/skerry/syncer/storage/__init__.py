"""What the syncer must never lose, as files: the run folder, its tape, versions of fragments, snapshots and good copies."""
