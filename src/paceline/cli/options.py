"""Options of a command that do not go together."""

import typer


def refuse_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raises where one of these options stands on the command line, even with its default: it would be
    ignored.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} {context.params[name]}: {why}")
