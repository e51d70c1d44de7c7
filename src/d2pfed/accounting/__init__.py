"""Privacy accounting: pure functions from what was released to what it cost."""
