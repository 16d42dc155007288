"""The checks, by stage: what each measures, plans and judges. `registry` lists them in run order."""
