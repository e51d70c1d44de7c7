import inspect

import d2pfed


def test_the_public_names_are_exactly_those_that_are_listed():
    visible = {
        name for name, value in vars(d2pfed).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert visible == set(d2pfed.__all__)
    assert len(d2pfed.__all__) == len(set(d2pfed.__all__))


def test_every_public_name_says_what_it_is():
    for name in d2pfed.__all__:
        value = getattr(d2pfed, name)
        assert inspect.getdoc(value), name


def test_errors_have_one_root():
    names = ("ConfigError", "PeerError", "TooFewClients", "BudgetExceeded", "LedgerError")
    assert all(issubclass(getattr(d2pfed, name), d2pfed.D2PFedError) for name in names)
