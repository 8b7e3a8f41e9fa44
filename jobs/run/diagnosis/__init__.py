"""Why a run failed or stands still, from what its processes left."""
