"""The cut of a model over ranks, as data: model shapes, pipeline schedules, placement of axes on ranks. Both halves use it."""
