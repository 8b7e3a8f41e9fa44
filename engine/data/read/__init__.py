"""From files to pixels: folders, tables, images, videos."""
