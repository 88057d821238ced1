"""Dynamic sparse training: masks, ages, schedules, and optimizer state for active weights only."""
