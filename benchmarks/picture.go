package main

import (
	"bytes"
	"image/color"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// curves are the contenders of the picture, in the colours of Okabe and Ito,
// which colour-blind readers tell apart.
var curves = []struct {
	name, label string
	colour      color.Color
	width       vg.Length
	dashes      []vg.Length
}{
	{bareName, "http.Client: no record, no retry", color.RGBA{0x70, 0x70, 0x70, 0xff}, 1.4, nil},
	{limitName, "the limit: http.Client and a raw file", color.RGBA{0x70, 0x70, 0x70, 0xff}, 1.4, []vg.Length{3, 3}},
	{oursName, "oncehttp", color.RGBA{0x00, 0x72, 0xb2, 0xff}, 2.6, nil},
	{byBatchName, "go-retryablehttp + gobreaker + db.Batch", color.RGBA{0xe6, 0x9f, 0x00, 0xff}, 1.4, nil},
	{byUpdateName, "go-retryablehttp + gobreaker + db.Update", color.RGBA{0xd5, 0x5e, 0x00, 0xff}, 1.4, nil},
}

// drawScaling draws the rate of POSTs over the number of callers.
func drawScaling(r results, file string) error {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	p := plot.New()
	p.BackgroundColor = color.White
	p.TextHandler = text.Plain{Fonts: font.DefaultCache}
	p.Title.Text = "POSTs per second to a server on the loopback interface (both axes logarithmic)"
	p.X.Label.Text, p.Y.Label.Text = "callers at once", "POSTs per second"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker = plot.ConstantTicks{{Value: 1, Label: "1"}, {Value: 8, Label: "8"}, {Value: 64, Label: "64"}, {Value: 256, Label: "256"}}
	p.Y.Tick.Marker = plot.ConstantTicks{{Value: 10, Label: "10"}, {Value: 100, Label: "100"}, {Value: 1000, Label: "1,000"}, {Value: 10_000, Label: "10,000"}, {Value: 100_000, Label: "100,000"}}
	p.Title.TextStyle.Font.Size, p.Title.Padding = 10, 4
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.TextStyle.Font.Size, axis.Tick.Label.Font.Size = 10, 9
	}
	p.Legend.TextStyle.Font.Size, p.Legend.Padding, p.Legend.ThumbnailWidth = 9, 2, 18
	p.Legend.XOffs, p.Legend.YOffs = -12, 3
	p.Add(plotter.NewGrid())
	for _, c := range curves {
		var points plotter.XYs
		for _, callers := range everyLoad {
			points = append(points, plotter.XY{X: float64(callers), Y: median(r.each(key{instantPost, callers, c.name}, rate))})
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return err
		}
		line.Color, line.Width, line.Dashes = c.colour, c.width, c.dashes
		p.Add(line)
		p.Legend.Add(c.label, line)
	}
	p.Y.Min, p.Y.Max = 10, 100_000

	svg := vgsvg.New(24*vg.Centimeter, 11*vg.Centimeter)
	canvas := draw.New(svg)
	canvas.SetColor(color.White)
	canvas.Fill(canvas.Rectangle.Path())
	p.Draw(draw.Crop(canvas, 2*vg.Millimeter, -4*vg.Millimeter, 2*vg.Millimeter, -2*vg.Millimeter))
	var b bytes.Buffer
	if _, err := svg.WriteTo(&b); err != nil {
		return err
	}
	// Few have the font. Arial is as wide.
	drawn := bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:'Liberation Sans',Arial,Helvetica,sans-serif;"))
	return os.WriteFile(file, drawn, 0o644)
}
