// Plots draws the figures of docs/storm.md from the data in docs/storm.
//
//	cd docs/plots && go run .
package main

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"image/color"
	"log"
	"os"
	"path/filepath"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Where the data are, and the figures go.
const (
	data    = "../storm"
	figures = ".."
)

// Of the storm, as in storm_test.go.
const (
	outageFrom, outageTo = 10.0, 40.0
	capacity             = 1.5
)

// The colours of Okabe and Ito, which colour-blind readers tell apart. The
// figures have a white ground, so that they read the same in GitHub's dark mode.
var (
	vermilion = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	blue      = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	green     = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	orange    = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	grey      = color.RGBA{0x70, 0x70, 0x70, 0xff}
	shade     = color.RGBA{0xec, 0xec, 0xec, 0xff}
)

func main() {
	log.SetFlags(0)
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	if err := drawStorm(); err != nil {
		log.Fatal(err)
	}
	if err := drawBackoff(); err != nil {
		log.Fatal(err)
	}
}

// A series is what a file says under one name, in the order of the file.
type series struct {
	name string
	rows [][]float64 // the columns after the name
}

func read(name string) ([]series, error) {
	f, err := os.Open(filepath.Join(data, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, err
	}
	var all []series
	index := make(map[string]int)
	for _, record := range records[1:] {
		i, ok := index[record[0]]
		if !ok {
			i = len(all)
			index[record[0]] = i
			all = append(all, series{name: record[0]})
		}
		row := make([]float64, len(record)-1)
		for j, field := range record[1:] {
			if row[j], err = strconv.ParseFloat(field, 64); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
		all[i].rows = append(all[i].rows, row)
	}
	return all, nil
}

// points returns two columns.
func (s series) points(x, y int) plotter.XYs {
	points := make(plotter.XYs, len(s.rows))
	for i, row := range s.rows {
		points[i] = plotter.XY{X: row[x], Y: row[y]}
	}
	return points
}

// Columns of storm.csv, after the policy. All but the first are per second, in
// parts of the usual load.
const (
	second = iota
	requests
	served
	wasted
	begun
	good
)

// drawStorm draws a panel for each policy.
func drawStorm() error {
	all, err := read("storm.csv")
	if err != nil {
		return err
	}
	const columns = 3
	var panels [][]*plot.Plot
	for i, s := range all {
		p, err := stormPanel(s, i == 0)
		if err != nil {
			return err
		}
		if i%columns == 0 {
			panels = append(panels, make([]*plot.Plot, columns))
			p.Y.Label.Text = "× usual load"
		}
		if i >= len(all)-columns {
			p.X.Label.Text = "seconds"
		}
		panels[i/columns][i%columns] = p
	}
	return save("storm.svg", panels, 24*vg.Centimeter, 18*vg.Centimeter)
}

func stormPanel(s series, legend bool) (*plot.Plot, error) {
	p := newPlot(s.name + ": " + recovery(s))
	p.Y.Min, p.Y.Max = 0, 4.5
	p.X.Tick.Marker = plot.ConstantTicks(ticks(0, 10, len(s.rows)))
	p.Y.Tick.Marker = plot.ConstantTicks(ticks(0, 1, 5))

	outage, err := plotter.NewPolygon(plotter.XYs{{X: outageFrom, Y: 0}, {X: outageTo, Y: 0}, {X: outageTo, Y: 4.5}, {X: outageFrom, Y: 4.5}})
	if err != nil {
		return nil, err
	}
	outage.Color, outage.LineStyle.Width = shade, 0
	limit, err := line(plotter.XYs{{X: 0, Y: capacity}, {X: float64(len(s.rows)), Y: capacity}}, grey, 1)
	if err != nil {
		return nil, err
	}
	limit.Dashes = []vg.Length{3, 3}
	load, err := line(s.points(second, requests), vermilion, 1.6)
	if err != nil {
		return nil, err
	}
	goodput, err := line(s.points(second, good), blue, 1.6)
	if err != nil {
		return nil, err
	}
	p.Add(outage, limit, load, goodput)
	if legend {
		p.Legend.Add("requests", load)
		p.Legend.Add("operations that succeed", goodput)
		p.Legend.Add("capacity of the server", limit)
		p.Legend.Add("outage", outage)
	}
	return p, nil
}

// recovery says when the last second ended in which less than 8 of 10 operations
// succeeded.
func recovery(s series) string {
	for i := len(s.rows) - 1; i >= outageTo; i-- {
		if s.rows[i][good] >= .8*s.rows[i][begun] {
			continue
		}
		if i == len(s.rows)-1 {
			return "does not recover"
		}
		return fmt.Sprintf("recovers in %d s", i+1-outageTo)
	}
	return "recovers at once"
}

// Columns of backoff.csv, after the backoff.
const (
	clients = iota
	calls
	seconds
)

func drawBackoff() error {
	all, err := read("backoff.csv")
	if err != nil {
		return err
	}
	work, took := newPlot("Calls until every client has written"), newPlot("Time until then (logarithmic)")
	work.Y.Label.Text, took.Y.Label.Text = "calls", "seconds"
	took.Y.Scale = plot.LogScale{}
	took.Y.Tick.Marker = plot.ConstantTicks{{Value: .3, Label: "0.3"}, {Value: 1, Label: "1"}, {Value: 3, Label: "3"}, {Value: 10, Label: "10"}, {Value: 30, Label: "30"}, {Value: 100, Label: "100"}}
	work.Add(plotter.NewGrid())
	took.Add(plotter.NewGrid())
	colours := []color.Color{grey, vermilion, orange, green, blue}
	for i, s := range all {
		width := vg.Length(1.4)
		if s.name == "full jitter" {
			width = 2.6
		}
		w, err := line(s.points(clients, calls), colours[i], width)
		if err != nil {
			return err
		}
		t, err := line(s.points(clients, seconds), colours[i], width)
		if err != nil {
			return err
		}
		work.Add(w)
		took.Add(t)
		work.Legend.Add(s.name, w)
	}
	for _, p := range []*plot.Plot{work, took} {
		p.X.Label.Text = "clients that contend for one row"
		p.X.Min, p.X.Max = 0, 200
		p.Y.Min = max(p.Y.Min, .2)
	}
	work.Y.Min = 0
	work.Legend.Left = true
	return save("backoff.svg", [][]*plot.Plot{{work, took}}, 24*vg.Centimeter, 10*vg.Centimeter)
}

func newPlot(title string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text = title
	p.Title.TextStyle.Font.Size = 10
	p.Title.Padding = 4
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.TextStyle.Font.Size = 10
		axis.Tick.Label.Font.Size = 9
	}
	p.Legend.Top = true
	p.Legend.TextStyle.Font.Size = 9
	p.Legend.Padding = 2
	p.Legend.ThumbnailWidth = 18
	p.Legend.YOffs, p.Legend.XOffs = -3, -3
	p.TextHandler = text.Plain{Fonts: font.DefaultCache}
	return p
}

func line(points plotter.XYs, c color.Color, width vg.Length) (*plotter.Line, error) {
	l, err := plotter.NewLine(points)
	if err != nil {
		return nil, err
	}
	l.Color, l.Width = c, width
	return l, nil
}

// ticks returns n+1 labelled ticks or fewer, up to most.
func ticks(from, step, most int) (all []plot.Tick) {
	for v := from; v <= most; v += step {
		all = append(all, plot.Tick{Value: float64(v), Label: strconv.Itoa(v)})
	}
	return all
}

func save(name string, panels [][]*plot.Plot, width, height vg.Length) error {
	svg := vgsvg.New(width, height)
	canvas := draw.New(svg)
	canvas.SetColor(color.White)
	canvas.Fill(canvas.Rectangle.Path())
	tiles := draw.Tiles{
		Rows: len(panels), Cols: len(panels[0]),
		PadX: 4 * vg.Millimeter, PadY: 4 * vg.Millimeter,
		PadTop: 2 * vg.Millimeter, PadBottom: 2 * vg.Millimeter, PadLeft: 2 * vg.Millimeter, PadRight: 3 * vg.Millimeter,
	}
	for i, row := range plot.Align(panels, tiles, canvas) {
		for j, c := range row {
			if panels[i][j] != nil {
				panels[i][j].Draw(c)
			}
		}
	}
	var b bytes.Buffer
	if _, err := svg.WriteTo(&b); err != nil {
		return err
	}
	// Few have the font. Arial is as wide.
	drawn := bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:'Liberation Sans',Arial,Helvetica,sans-serif;"))
	return os.WriteFile(filepath.Join(figures, name), drawn, 0o644)
}
