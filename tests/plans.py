"""Plans of repeated calls in tests: none from other tests, calls without them, and which there are."""

from nvalchemiops.torch.runtime import engine


def forget(*owners):
    """Nothing is kept from earlier calls, those of these modules or potentials included."""
    for owner in owners:
        vars(owner).pop(engine.OWN, None)
    engine.everywhere.clear()
    engine.everywhere.recorded = engine.everywhere.replayed = 0


def ordinary(call):
    """The results of ``call()`` without a plan."""
    with engine.off():
        return call()


def plans_of_calls(owner=None, *, of_derivatives=False):
    """Plans of calls, or of functions of a backward pass; those of a module, a potential or a calculator."""
    table = engine.everywhere if owner is None else vars(owner)[engine.OWN]
    entries = list(table.entries.items())
    return [entry.plan for key, entry in entries if entry.plan is not None and bool(key[1]) == of_derivatives]


def plan_of(*, count=1):
    """The plan of the last call, if there are so many."""
    found = plans_of_calls()
    assert len(found) == count, engine.explain()
    return found[-1] if found else None
