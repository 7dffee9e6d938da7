package kube

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// comparison is a table of figures, less of each of which is better, by deployment.
type comparison struct {
	columns []string
	rows    []*comparedRow
	faults  map[[2]string][]string // failed calls and wrong answers, by part and deployment
}

type comparedRow struct {
	part, what string
	values     map[string]float64
}

// Figures that differ by less than this share, or by no more than this amount, are taken for the same.
const (
	evenShare  = 0.05
	evenAmount = 0.05
)

func newComparison(deployments []deployment) *comparison {
	m := &comparison{faults: map[[2]string][]string{}}
	for _, d := range deployments {
		m.columns = append(m.columns, d.name)
	}
	return m
}

func (m *comparison) add(part, what, column string, value float64) {
	for _, row := range m.rows {
		if row.part == part && row.what == what {
			row.values[column] = value
			return
		}
	}
	m.rows = append(m.rows, &comparedRow{part, what, map[string]float64{column: value}})
}

// addSpending adds the rows that each part has. The CPU time is of a unit of the part's work, such as a second.
func (m *comparison) addSpending(part, column string, spent spending, unit string, units float64) {
	m.add(part, "CPU, ms "+unit, column, spent.cpu.Seconds()*1000/units)
	m.add(part, "memory, MB", column, spent.peak)
	m.add(part, "sent by etcd, MB "+unit, column, spent.sentMB/units)
}

// addLatencies adds the rows of the writes of a load, and what failed of all its calls.
func (m *comparison) addLatencies(part, column string, load *load, writes string) {
	m.add(part, "p50 of writes, ms", column, load.quantile(writes, 0.5))
	m.add(part, "p99 of writes, ms", column, load.quantile(writes, 0.99))
	if load.failed > 0 {
		m.fault(part, column, "%d of %d calls failed: %v", load.failed, load.count(), load.first)
	}
}

// fault notes that not every answer was right, which each row of the part shows: such a deployment does not win.
func (m *comparison) fault(part, column, format string, args ...any) {
	key := [2]string{part, column}
	text := strings.NewReplacer("|", "/", "\n", " ").Replace(fmt.Sprintf(format, args...))
	m.faults[key] = append(m.faults[key], text[:min(len(text), 200)])
}

// winners returns the deployments with the smallest figure, and by how much the best one of rangecaches is larger or smaller
// than etcd alone.
func (m *comparison) winners(row *comparedRow) (names []string, difference string) {
	// Below zero: none is measured.
	least, rangecaches := -1.0, -1.0
	for _, column := range m.columns {
		value, measured := row.values[column]
		if !measured || m.faults[[2]string{row.part, column}] != nil {
			continue
		}
		if least < 0 || value < least {
			least = value
		}
		if column != noRangecache.name && (rangecaches < 0 || value < rangecaches) {
			rangecaches = value
		}
	}
	for _, column := range m.columns {
		value, measured := row.values[column]
		if measured && m.faults[[2]string{row.part, column}] == nil && value <= least*(1+evenShare)+evenAmount {
			names = append(names, column)
		}
	}
	if alone := row.values[noRangecache.name]; rangecaches < 0 || alone < evenAmount {
		return names, "–"
	} else {
		return names, fmt.Sprintf("%+.0f %%", (rangecaches/alone-1)*100)
	}
}

// markdown returns the table: rows that etcd alone wins first, those that are even next.
func (m *comparison) markdown() string {
	class := func(row *comparedRow) int {
		names, _ := m.winners(row)
		switch {
		case len(names) == 1 && names[0] == noRangecache.name:
			return 0
		case slices.Contains(names, noRangecache.name):
			return 1
		default:
			return 2
		}
	}
	rows := slices.Clone(m.rows)
	slices.SortStableFunc(rows, func(a, b *comparedRow) int { return cmp.Compare(class(a), class(b)) })
	var text strings.Builder
	fmt.Fprintf(&text, "| | | %s | wins | best with rangecache, against none |\n|---|---|%s---|---|\n", strings.Join(m.columns, " | "), strings.Repeat("---|", len(m.columns)))
	for _, row := range rows {
		names, difference := m.winners(row)
		cells := []string{row.part, row.what}
		for _, column := range m.columns {
			cells = append(cells, m.cell(row, column))
		}
		if len(names) == len(row.values) {
			names = []string{"even"}
		}
		cells = append(cells, strings.Join(names, ", "), difference)
		fmt.Fprintf(&text, "| %s |\n", strings.Join(cells, " | "))
	}
	return text.String()
}

func (m *comparison) cell(row *comparedRow, column string) string {
	value, measured := row.values[column]
	if !measured {
		return "–"
	}
	digits := 0
	if value < 10 {
		digits = 2
	} else if value < 100 {
		digits = 1
	}
	return strings.Join(append([]string{fmt.Sprintf("%.*f", digits, value)}, m.faults[[2]string{row.part, column}]...), "; ")
}
