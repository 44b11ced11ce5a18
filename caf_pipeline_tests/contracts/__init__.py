"""What every implementation of an interface does: test classes that the tests of an implementation
inherit.

Each says which fixture the heir gives. The tests of one implementation alone are in its own folder,
e.g. `store`.
"""
