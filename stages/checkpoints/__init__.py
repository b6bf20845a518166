"""What a checkpoint is: Hub ids, formats, headers, extents, files read directly or mapped."""
