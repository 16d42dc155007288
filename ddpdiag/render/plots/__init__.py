"""Pictures: the one home of matplotlib.

It is loaded only when a picture is asked for, and used without pyplot, whose state is global. The same report gives
the same bytes, whatever a matplotlibrc says. `bars`, `heat`, `stacked` and `timeline` draw what the HTML page shows, in
colours that follow the page.
"""
