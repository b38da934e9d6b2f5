"""Settings of this folder."""

from hypothesis import settings

# No deadline: these tests share their cores with others. The same examples every time: a red run can be repeated.
settings.register_profile("unit", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("unit")
