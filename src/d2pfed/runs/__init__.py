"""The driver of a run: resume, round, record, checkpoint, conclude, report."""
