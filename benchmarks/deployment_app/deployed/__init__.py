"""One model over Flower in three ways: averaged in the clear, with Flower's SecAgg+, and privately."""
