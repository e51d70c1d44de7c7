"""A consortium of 20 unequal silos: privacy of a record over all of them, beside what it could have done instead."""
